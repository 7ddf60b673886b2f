"""What the zoo's architectures still fail at, by name, with the reason."""

#: Not quantized, wrong, or broken.
WRONG: dict[str, str] = {}

#: Right, but not savable.
UNSAVABLE: dict[str, str] = {}
