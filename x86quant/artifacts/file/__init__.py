"""The file: its container, its tensors, and plain values in it."""
