"""Random programs of torch ops: their source, and the judge of what x86quant makes of them."""
