"""Native graphs of dynamic int8 layers: blocks, and a decoder's token steps."""
