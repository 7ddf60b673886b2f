"""The native kernels: their C++ sources, their build, and a ctypes view of them."""
