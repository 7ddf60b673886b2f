"""What ``import x86quant`` adds to ``import torch``.

python -m benchmarks.import_time
"""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = (
    "import time, torch; t = time.perf_counter(); import x86quant;"
    "print((time.perf_counter() - t) * 1e3)"
)


def main() -> None:
    """Import in fresh interpreters and print the median."""
    times = [
        float(subprocess.check_output([sys.executable, "-W", "ignore", "-c", CODE]))
        for _ in range(9)
    ]
    print(
        f"import x86quant after torch: median {statistics.median(times):.1f} ms, "
        f"maximum {max(times):.1f} ms"
    )


if __name__ == "__main__":
    main()
