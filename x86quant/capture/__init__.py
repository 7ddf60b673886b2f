"""A module and its calls as proved graphs: the one way to trace by torch.export, and the proof."""
