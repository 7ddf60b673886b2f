"""Commands for those who work on x86quant; no part of the package."""
