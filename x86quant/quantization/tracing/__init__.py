"""From a float module to one graph of tensors, proved to be the module."""
