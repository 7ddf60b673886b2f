"""What a measurement was made on."""

from __future__ import annotations

import torch

import x86quant


def print_environment() -> None:
    """Print CPU, versions, threads and the rules in force."""
    print(x86quant.cpu())
    print(
        f"x86quant {x86quant.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), rules: {x86quant.current_rules().name}\n"
    )
