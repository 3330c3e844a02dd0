"""Measurements in separate processes: startup, peak memory, and training in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median

from tests.helpers.processes import free_port
from tools.ranks.pool import world_environment

WHOLE = ("startup", "memory", "ddp", "fsdp")
CONTENDERS = ("raw", "null", "trainstack_lean", "trainstack_default")
STEPS = 50
"""The number of steps of the workload `fsdp`."""
TITLES = {
    "startup": ("a new process to the end of its first training step of W1, imports included", "CPU s"),
    "memory": ("peak resident memory of a process that trains on W3", "MiB"),
    "ddp": ("W2 over 2 gloo processes, 60 batches, nothing clipped; both together", "CPU s"),
    "fsdp": (
        f"W3 sharded over 2 gloo processes, {STEPS} steps, nothing clipped; both together",
        "CPU s",
    ),
}


def measure_processes(case: str, rounds: int, tell: Callable[[str], None] = lambda line: None) -> str:
    """A table of `case`, one of `WHOLE`: contenders interleaved over rounds, ratios within a round.

    Raises:
        RuntimeError: a process failed; with `ddp` and `fsdp`, weights differ from those of the hand-written loop; or,
            with `fsdp`, a step has more collectives than in that loop.
    """
    values: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        tell(f"{case}: round {number} of {rounds}")
        for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
            value = _measure(case, "raw" if name == "null" else name)
            if number:
                values[name].append(value)
    title, unit = TITLES[case]
    lines = [
        f"{case}: {title}; {rounds} rounds",
        "",
        f"| contender | {unit} | of raw | lowest - highest |",
        "|-|-|-|-|",
    ]
    for name, mine in values.items():
        ratios = [a / b for a, b in zip(mine, values["raw"], strict=True)]
        lines.append(f"| {name} | {median(mine):.3f} | {median(ratios):.3f} | {min(ratios):.2f} - {max(ratios):.2f} |")
    if case == "fsdp":
        lines += ["", *_compare_collectives(case)]
    return "\n".join(lines)


def _compare_collectives(case: str) -> list[str]:
    """A line for each contender; raises for one with more collectives in a step than the hand-written loop."""
    raw, lines = _collectives[case, "raw"], []
    for (_, name), counts in _collectives.items():
        lines.append(f"{name}: {counts[0]} all-gathers and {counts[1]} reduce-scatters a rank")
        if any(mine // STEPS > theirs // STEPS for mine, theirs in zip(counts, raw, strict=True)):
            raise RuntimeError(f"{lines[-1]}, and the hand-written loop has {raw}")
    return lines


def _measure(case: str, contender: str) -> float:
    if case in ("ddp", "fsdp"):
        return _world(case, contender)
    child = subprocess.Popen([sys.executable, "-m", "tools.bench.child", case, contender], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{contender} failed in {case}, with exit code {child.returncode}")
    return float(said.split()[-1]) if case == "memory" else usage.ru_utime + usage.ru_stime


_sums: dict[str, list[str]] = {}
"""By workload, the sum over the final weights of each rank in the first run."""
_collectives: dict[tuple[str, str], list[int]] = {}
"""By workload and contender, the largest numbers of all-gathers and reduce-scatters of a rank."""


def _world(case: str, contender: str, size: int = 2) -> float:
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.bench.child", case, contender],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in world_environment(size, free_port())
    ]
    said = [child.communicate(timeout=300)[0].split()[-4:] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"{contender} failed in {case}")
    sums, counts = [words[3] for words in said], [[int(word) for word in words[:2]] for words in said]
    if sums != _sums.setdefault(case, sums) or (case == "ddp" and len(set(sums)) > 1):
        raise RuntimeError(f"{contender} ended with other weights: sums of {sums} instead of {_sums[case]}")
    _collectives[case, contender] = [max(one) for one in zip(*counts, strict=True)]
    return sum(float(words[2]) for words in said)
