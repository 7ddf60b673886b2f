"""Measure and fit again: ``python rules/retune.py`` is ``x86quant tune``, with the same options.

To measure for a shipped table::

    python rules/retune.py --isa all --out rules/measurements/this_machine.csv
"""

import sys

from x86quant.cli import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
