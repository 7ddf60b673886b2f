"""The runtime's C++: convolution packs behind one interface, steps, and the program that runs them."""
