"""Linears on float tensors as packed weights: ``extension.native().DynamicLinear``."""
