"""The ``x86quant`` command: a module for each sub-command, with ``HELP``, ``configure``, ``run``.

Exit status: 0 done, 1 the answer is no (a check failed, a target was missed), 2 wrong usage or
input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from x86quant.errors import X86QuantError

#: Modules of this package, in the order ``--help`` lists them.
COMMANDS: tuple[str, ...] = ("info", "quantize", "explain", "bench", "report", "tune", "rules")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="x86quant", description="int8 inference on x86 CPUs.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"x86quant.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.configure(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Errors are one line on stderr."""
    # A closed pipe (`x86quant ... | head`) ends the command quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (X86QuantError, OSError) as error:
        print(f"x86quant {options.command}: {error}", file=sys.stderr)
        return 2
