"""A unified x86 int8 quantization backend for PyTorch."""
