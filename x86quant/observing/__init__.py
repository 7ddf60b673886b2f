"""Observers: what watches values in calibration and chooses the range that int8 codes cover.

They are modules of our own. ``stock.observers`` lets stock PyTorch take them for its own too.
"""
