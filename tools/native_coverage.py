"""Which lines of the kernels, the steps and the runtime are run by the fuzzers, by file.

    pip install gcovr
    python -m tools.native_coverage --seeds 200

Builds all native code but what binds it to Python once more, so that it counts the lines it runs;
lets the fuzz of the kernels, of program files and of teams run, at all levels that this CPU has or
that can be emulated on it, and prints the share of each file, least first. Needs a checkout and
GCC.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import x86quant
from tests.native.build import DEFAULT_DIRECTORY
from tests.native.sanitize import fuzzer
from tools.sanitize_serving import built, exported, of_each_kind
from x86quant.hardware.isa import LEVELS

_ROOT = Path(__file__).resolve().parents[1]


def _run(seeds: int, folder: Path) -> None:
    """Everything that is counted."""
    here = [name for name, level in LEVELS.items() if level.features <= x86quant.cpu().features]
    start, *isas = fuzzer(folder, "coverage", emulate=True)
    commands = [[start, "0", str(seeds), *isas]]
    fuzz, race = (str(built(name, "coverage", folder)) for name in ("fuzz", "race"))
    networks = exported(folder)
    commands += [[fuzz, str(x), "0", str(seeds), *here] for x in (*networks, *of_each_kind(folder))]
    commands += [[race, str(x), "3", *here] for x in networks]
    commands.append([str(built("team", "coverage", folder)), "200"])
    for command in commands:
        print(*command, flush=True)
        subprocess.run(command, check=True)


def main() -> int:
    """Build, run, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200, help="of each fuzz")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY.parent / "coverage")
    options = parser.parse_args()
    if shutil.which("gcovr", path=str(Path(sys.executable).parent)) is None:
        parser.error("gcovr is missing: pip install gcovr")
    options.directory.mkdir(parents=True, exist_ok=True)
    for old in options.directory.glob("**/*.gcda"):
        old.unlink()
    _run(options.seeds, options.directory)
    command = [sys.executable, "-m", "gcovr", "--root", str(_ROOT), "--json-summary", "-"]
    command += ["--gcov-ignore-errors", "all", "--merge-mode-functions", "separate"]
    command += ["--filter", f"{_ROOT}/kernels/"]
    command += ["--exclude", ".*/fuzz/.*", "--merge-lines", str(options.directory)]
    told = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    found = json.loads(told)
    for one in sorted(found["files"], key=lambda file: file["line_percent"]):
        lines = f"{one['line_covered']:5} of {one['line_total']:5}"
        print(f"{one['line_percent']:5.1f} %  {lines}  {one['filename']}")
    print(f"{found['line_percent']:5.1f} % of all {found['line_total']} lines")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
