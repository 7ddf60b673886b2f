"""From a calibrated model to the one that is returned: what runs, is close to float, is fast."""
