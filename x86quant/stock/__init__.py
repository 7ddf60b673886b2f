"""The stock PyTorch workflow: the engine's hook, qconfig mappings, observers, packs in a model."""
