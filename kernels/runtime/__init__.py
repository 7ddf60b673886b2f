"""The runtime in C++: convolution packs, steps, and the program that runs them."""
