"""Packed weights that the stock ops accept and that run on the kernels the router chose."""
