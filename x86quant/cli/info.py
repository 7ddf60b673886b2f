"""What this CPU can do, which rules are in force, and the versions that matter."""

from __future__ import annotations

import argparse
import dataclasses
import json

HELP = "the CPU, the rules in force, versions"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what ``x86quant`` sees."""
    import torch

    import x86quant
    from x86quant.tables.likeness import likeness

    cpu = x86quant.cpu()
    table = x86quant.current_rules()
    like = likeness(table, cpu)
    facts = {
        "x86quant": x86quant.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rules": table.name,
        "rules_measured": {"on": like.measured, "like_this_cpu": like.degree},
        "cpu": dataclasses.asdict(cpu),
    }
    if options.json:
        print(json.dumps(facts, indent=2, default=_plain))
    else:
        for name in ("x86quant", "torch", "threads", "rules"):
            print(f"{name:<9} {facts[name]}")
        print(f"{'':<9} {like}")
        print(cpu)
    return 0


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset | set) else str(value)
