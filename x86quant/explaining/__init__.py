"""Answers about a model: which kernels, why, whether all of it is int8; and choosing again."""
