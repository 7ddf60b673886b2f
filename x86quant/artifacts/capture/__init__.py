"""A model as graphs that a file can hold, by torch.export."""
