"""The native kernels by themselves, without torch: built, seen from Python, fuzzed."""
