"""What only shows in processes of their own: starting up, peak memory, and training in two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from statistics import median

WHOLE = ("startup", "memory", "ddp")
CONTENDERS = ("raw", "null", "trainstack_lean", "trainstack_default")
TITLES = {
    "startup": ("a new process to the end of its first training step of W1, imports included", "CPU s"),
    "memory": ("peak resident memory of a process that trains on W3", "MB"),
    "ddp": ("W2 over 2 gloo processes, 60 batches, nothing clipped; both together", "CPU s"),
}


def measure_processes(what: str, rounds: int, tell: Callable[[str], None] = lambda line: None) -> str:
    """A table of `what`, one of `WHOLE`: contenders interleaved over rounds, ratios within a round.

    Raises:
        RuntimeError: a process failed, or, with `ddp`, weights differ from those of the hand-written loop.
    """
    values: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        tell(f"{what}: round {number} of {rounds}")
        for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
            value = _measure(what, "raw" if name == "null" else name)
            if number:
                values[name].append(value)
    title, unit = TITLES[what]
    lines = [
        f"{what}: {title}; {rounds} rounds",
        "",
        f"| contender | {unit} | of raw | lowest - highest |",
        "|-|-|-|-|",
    ]
    for name, mine in values.items():
        ratios = [a / b for a, b in zip(mine, values["raw"], strict=True)]
        lines.append(f"| {name} | {median(mine):.3f} | {median(ratios):.3f} | {min(ratios):.2f} - {max(ratios):.2f} |")
    return "\n".join(lines)


def _measure(what: str, contender: str) -> float:
    if what == "ddp":
        return _ddp(contender)
    child = subprocess.Popen([sys.executable, "-m", "tools.bench.child", what, contender], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{contender} failed in {what}, with exit code {child.returncode}")
    return float(said.split()[-1]) if what == "memory" else usage.ru_utime + usage.ru_stime


_sums: dict[str, str] = {}


def _ddp(contender: str, size: int = 2) -> float:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(size),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.bench.child", "ddp", contender],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [child.communicate(timeout=300)[0].split()[-2:] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"{contender} failed in ddp")
    weights = {total for _, total in said} | {_sums.setdefault("ddp", said[0][1])}
    if len(weights) > 1:
        raise RuntimeError(f"{contender} ended with other weights: sums of {sorted(weights)}")
    return sum(float(seconds) for seconds, _ in said)
