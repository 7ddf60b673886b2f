"""What a module can be in a file: how each form is recognized, written and read."""
