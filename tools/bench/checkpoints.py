"""Measure the wall time of saving and loading a model with Adam, in processes that have not used such memory before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainstack import Checkpoint, DefaultCheckpointer, DefaultCheckpointerArguments
from trainstack.checkpointing import read_checkpoint

TITLE = "saving and loading 50 million parameters with Adam's state"
MILLIONS = 50
_FLOOR = "only reading the bytes into fresh memory, one thread"

State = dict[str, Any]
Seconds = dict[str, list[float]]


def measure_checkpoints(rounds: int, millions: int = MILLIONS, tell: Callable[[str], None] = lambda line: None) -> str:
    """A table of medians; ratios are medians of the ratios within a round.

    Args:
        rounds: the measured rounds, after one that is not counted.
        millions: the number of tensors of a million float32 values, each for weights and two averages.
        tell: gets a line of progress.
    """
    seconds: Seconds = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TRAINSTACK_BENCH_DIR")) as folder:
        for number in range(rounds + 1):
            tell(f"checkpoint: round {number} of {rounds}" if number else "checkpoint: warming up")
            times = {**_in_a_new_process("save", folder, str(millions)), **_load(folder)}
            for name, value in times.items() if number else ():
                seconds.setdefault(name, []).append(value)
    return _table(seconds, millions)


def _make_state(millions: int) -> State:
    def tensors() -> list[torch.Tensor]:
        return [torch.randn(1000, 1000) for _ in range(millions)]

    averages = enumerate(zip(tensors(), tensors(), strict=True))
    optimizer = {i: {"step": torch.tensor(1.0), "exp_avg": a, "exp_avg_sq": b} for i, (a, b) in averages}
    return {"model": {f"layers.{i}.weight": t for i, t in enumerate(tensors())}, "optimizer": {"state": optimizer}}


def _timed(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _in_a_new_process(*words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.bench.checkpoints", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _save(state: State, folder: Path) -> dict[str, float]:
    """Seconds of each way to save, without the time to delete the files of the previous round."""
    for old in ("ours", "async"):
        shutil.rmtree(folder / old, ignore_errors=True)
    (folder / "torch.pt").unlink(missing_ok=True)

    def by_torch() -> None:
        with open(folder / "torch.pt", "wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())

    def saver(where: str, **changes: Any) -> DefaultCheckpointer:
        args = DefaultCheckpointerArguments(save_dir=str(folder / where), log_level="ERROR", **changes)
        return DefaultCheckpointer(args)

    def checkpoint(step: int) -> Checkpoint:
        return Checkpoint(module_interface_state=state["model"], trainer_state=state["optimizer"], global_step=step)

    times = {"torch.save and fsync": _timed(by_torch)}
    foreground, background = saver("ours"), saver("async", async_save=True)
    times["trainstack"] = _timed(lambda: foreground.save(checkpoint(1), 1))
    times["trainstack, async_save: first save, loop held up"] = _timed(lambda: background.save(checkpoint(1), 1))
    background.load()  # waits for the save, and loads nothing without `resume`
    began = time.perf_counter()
    background.save(checkpoint(2), 1)
    times["trainstack, async_save: later saves, loop held up"] = time.perf_counter() - began
    background.finish()
    times["trainstack, async_save: later saves, until durable"] = time.perf_counter() - began
    return times


WAYS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "torch": ("torch.load(weights_only=True)", lambda folder: torch.load(folder / "torch.pt", weights_only=True)),
    "ours": ("trainstack, verified", lambda folder: read_checkpoint(_newest(folder))),
    "mapped": ("trainstack, verified, mapped=True", lambda folder: read_checkpoint(_newest(folder), mapped=True)),
    "used": ("trainstack, verified, mapped=True, every value read once", lambda folder: _use(_newest(folder))),
    "floor": (_FLOOR, lambda folder: [_read(path) for path in _newest(folder).glob("*.safetensors")]),
}


def _newest(folder: Path) -> Path:
    return folder / "ours" / "checkpoint-000000001"


def _read(path: Path) -> torch.Tensor:
    buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
    with open(path, "rb", buffering=0) as handle:
        handle.readinto(buffer.numpy().data)
    return buffer


def _use(path: Path) -> float:
    checkpoint = read_checkpoint(path, mapped=True)
    model, trainer = checkpoint.module_interface_state, checkpoint.trainer_state
    assert model is not None
    assert trainer is not None
    tensors = [*model.values(), *(tensor for entry in trainer["state"].values() for tensor in entry.values())]
    return sum(float(tensor.sum()) for tensor in tensors)


def _load(folder: str) -> dict[str, float]:
    times: dict[str, float] = {}
    for way in WAYS:
        times |= _in_a_new_process(way, folder)
    return times


def _main(case: str, folder: str, millions: str = "0") -> dict[str, float]:
    torch.set_num_threads(1)
    if case == "save":
        return _save(_make_state(int(millions)), Path(folder))
    name, load = WAYS[case]
    return {name: _timed(lambda: load(Path(folder)))}


def _table(seconds: Seconds, millions: int) -> str:
    rows = [("way", "seconds", "compared with", "ratio", "lowest - highest")]
    for name, mine in seconds.items():
        against = "torch.save and fsync" if "held" in name or "durable" in name or name == "trainstack" else None
        if against is None and name != "torch.save and fsync" and not name.startswith("torch.load"):
            against = "torch.load(weights_only=True)"
        ratios = [a / b for a, b in zip(mine, seconds[against or name], strict=True)]
        rows.append(
            (
                name,
                f"{median(mine):.3f}",
                against or "",
                f"{median(ratios):.3f}" if against else "",
                f"{min(ratios):.2f} - {max(ratios):.2f}" if against else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    rounds = len(seconds["trainstack"])
    return "\n".join(
        [f"checkpoint: {TITLE} ({millions * 12} MB); wall time, {os.cpu_count()} cores, {rounds} rounds", "", *lines]
    )


if __name__ == "__main__":
    print(json.dumps(_main(*sys.argv[1:])))
