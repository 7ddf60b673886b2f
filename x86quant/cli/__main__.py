"""``python -m x86quant.cli``: the same as the ``x86quant`` command."""

import sys

from x86quant.cli import main

sys.exit(main())
