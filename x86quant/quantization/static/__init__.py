"""Static int8: which parts of a model, which steps of a part, with what ranges."""
