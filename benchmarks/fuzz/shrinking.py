"""Smaller programs that fail too."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import torch

from benchmarks.fuzz.judging import judged
from benchmarks.fuzz.programs import Program

#: So many smaller programs are tried at most.
_TRIALS = 200


def kind_of(reason: str) -> str:
    """What failures of one cause have in common: the reason without its numbers, or the error."""
    lines = reason.strip().splitlines()
    text = lines[-1] if "Traceback" in reason else lines[0].partition(": ")[2]
    return re.sub(r"-?\b\d+(\.\d+)?\b|-inf|\([\d, ]*\)", "#", text)[:100]


def shrunk(program: Program, through: str, reason: str) -> Program:
    """A smaller program that fails in the same way."""
    left = _TRIALS
    kind = kind_of(reason).partition(" ")[0]
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(program):
            left -= 1
            try:
                with torch.no_grad():
                    candidate.build()(*candidate.data(0, 2))
            except Exception:
                continue
            verdict = judged(candidate, through)
            if verdict.kind == "failed" and kind_of(verdict.reason).startswith(kind):
                program, smaller = candidate, True
                break
            if left <= 0:
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    names = {line.partition(" = ")[0].split(",")[0] for line in program.body if " = " in line}
    for name in sorted(names):
        if name.isidentifier() and program.result != name:
            yield dataclasses.replace(program, result=name)
    for index in range(len(program.body) - 1, -1, -1):
        body = (*program.body[:index], *program.body[index + 1 :])
        yield dataclasses.replace(program, body=body)
    used = " ".join(program.body)
    for index, line in enumerate(program.made):
        if f"{line.partition(' ')[0]}(" not in used and not line.startswith("pass"):
            made = (*program.made[:index], "pass", *program.made[index + 1 :])
            yield dataclasses.replace(program, made=made)
