"""The accuracy kit: what keeps the function of a float model and makes its int8 form better."""
