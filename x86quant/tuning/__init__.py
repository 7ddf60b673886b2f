"""Measuring kernels on this machine, and making rule tables of what was measured."""
