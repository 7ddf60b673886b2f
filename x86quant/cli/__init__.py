"""The ``x86quant`` command: a module for each sub-command, with ``HELP``, ``configure``, ``run``.

Exit status: 0 done, 1 the answer is no (a check failed, a target was missed), 2 wrong usage or
input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from x86quant.errors import TRACEBACK_VARIABLE, X86QuantError
from x86quant.hardware.isa import forced_level
from x86quant.version import __version__

#: Modules of this package, in the order ``--help`` lists them.
COMMANDS: tuple[str, ...] = (
    "info",
    "quantize",
    "explain",
    "bench",
    "report",
    "serve",
    "tune",
    "rules",
    "export-program",
    "cpp",
)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="x86quant", description="int8 inference on x86 CPUs.")
    top.add_argument("--version", action="version", version=f"x86quant {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"x86quant.cli.{name.replace('-', '_')}")
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.configure(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Errors are one line on stderr."""
    # A closed pipe (`x86quant ... | head`) ends the command quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is spelled out
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    try:
        forced_level()
        return int(options.run(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (X86QuantError, OSError) as error:
        _tell(options.command, str(error))
        return 2
    except Exception as error:  # whatever a model, a metric or torch raises on the way
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        first = next(iter(str(error).strip().splitlines()), "")
        kind = type(error).__name__
        _tell(options.command, f"{kind}: {first} (for the traceback set {TRACEBACK_VARIABLE}=1)")
        return 2


def _tell(command: str, message: str) -> None:
    """An error as one line."""
    print(f"x86quant {command}: {' '.join(message.split())}", file=sys.stderr)
