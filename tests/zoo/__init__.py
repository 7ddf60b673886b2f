"""Small architectures of every kind with random weights, on which ``quantize`` has to hold."""
