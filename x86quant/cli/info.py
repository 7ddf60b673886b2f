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
    from x86quant.hardware.allowance import memory_nodes
    from x86quant.hardware.processes import for_one_answer, for_rate
    from x86quant.kernels.probing import libraries
    from x86quant.routing.in_force import stale
    from x86quant.tables.likeness import likeness

    facts: dict[str, object] = {
        "x86quant": x86quant.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "libraries": {
            name: {"version": libraries.version(name), "on_record": libraries.on_record(name)}
            for name in libraries.LIBRARIES
        },
    }
    try:
        cpu = x86quant.cpu()
    except x86quant.CpuTooOldError as error:
        facts |= {"rules": None, "cpu": None, "missing": str(error)}
        description = f"{error} Models run in plain torch, slowly."
    else:
        table = x86quant.current_rules()
        like = likeness(table, cpu)
        other_versions = stale(table)
        facts |= {
            "rules": table.name,
            "rules_measured": {
                "on": like.measured,
                "like_this_cpu": like.degree,
                "stale": other_versions,
            },
            "cpu": dataclasses.asdict(cpu),
        }
        nodes = memory_nodes()
        rate = for_rate(cpu.best_threads, nodes)
        soon = for_one_answer(cpu.best_threads, nodes)
        facts["processes"] = {
            "for_rate": dataclasses.asdict(rate),
            "for_one_answer": dataclasses.asdict(soon),
            "memory_nodes": nodes,
        }
        note = "" if other_versions is None else f"{'':<9} {other_versions}\n"
        description = f"{'':<9} {like}\n{note}{cpu}"
        if torch.get_num_threads() > cpu.best_threads:
            description += (
                f"\n  advice: torch.set_num_threads({cpu.best_threads}), "
                "as many as this process can use at a time"
            )
        if cpu.best_threads > 1:
            held = ", each held to one node of memory (numactl)" if nodes > 1 else ""
            description += (
                f"\nserve     most answers a second: {rate}; the soonest one: {soon}{held}"
            )
    if options.json:
        print(json.dumps(facts, indent=2, default=_plain))
    else:
        for name in ("x86quant", "torch", "threads", "rules"):
            print(f"{name:<9} {facts[name] or 'none'}")
        print(description)
        for name in libraries.LIBRARIES:
            if not libraries.on_record(name):
                print(
                    f"  {name} {libraries.version(name)} is not on record: it is tried out before "
                    "a kernel of it is chosen"
                )
    return 0


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset | set) else str(value)
