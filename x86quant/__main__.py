"""``python -m x86quant`` is the command ``x86quant``."""

import sys

from x86quant.cli import main

if __name__ == "__main__":
    sys.exit(main())
