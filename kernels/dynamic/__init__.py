"""Linears on float tensors as packed weights: ``torch.classes.x86quant.DynamicLinear``."""
