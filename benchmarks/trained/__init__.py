"""Trained networks in int8: ours beside others', by each task's own metric on unseen data."""
