"""Measure the memory of 1, 2 and 3 processes that share a model by `fsdp`, with AdamW: tensors and peaks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tools.bench.allocator import memory

WIDTH, MIB = 2048, 2**20
HOW = {
    "cpu": "built on the CPU",
    "meta": "built on the meta device, initialized",
    "files": "built on the meta device, loaded from a file",
}


def main(argv: Sequence[str]) -> int:
    """Print a table; with `--worker`, run one of the processes."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench sharding-memory", description=__doc__)
    parser.add_argument("--millions", type=int, default=200, help="parameters in millions (default: 200)")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    layers = max(1, round(given.millions * 1e6 / (WIDTH * WIDTH + WIDTH)))
    if given.worker:
        _work(given.worker[0], Path(given.worker[1]), layers)
        return 0
    print(
        f"{layers * (WIDTH * WIDTH + WIDTH) / 1e6:.0f} million parameters in float32, AdamW; MiB of the largest process"
    )
    print("| the module was | processes | parameters | gradients | optimizer | peak at start | peak in a step |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TRAINSTACK_BENCH_DIR")) as folder:
        ts.export_model(_model(layers), Path(folder) / "weights")
        for how, words in HOW.items():
            for size in (1, 2, 3):
                print(
                    f"| {words} | {size} | {' | '.join(f'{one:,.0f}' for one in _measure(how, size, folder, given))} |"
                )
    return 0


def _measure(how: str, size: int, folder: str, given: argparse.Namespace) -> list[float]:
    """The largest numbers of a process, in MiB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["-m", "tools.bench", "sharding-memory", f"--millions={given.millions}", "--worker", how, folder]
    # Otherwise glibc keeps freed blocks of up to 32 MiB, and the peak is that of its heap.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return [max(column) / MIB for column in zip(*found, strict=True)]


def _model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


class _Module(ts.SupervisedModule):
    gradients = 0

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        self.gradients = _bytes(one.grad for one in self.parameters())


def _work(how: str, folder: Path, layers: int) -> None:
    with _Peak() as peak:
        with torch.device("cpu" if how == "cpu" else "meta"):
            model = _model(layers)
        data = TensorDataset(torch.ones(6, WIDTH), torch.ones(6, WIDTH))
        args = ts.TrainerArguments(
            backend="fsdp",
            max_steps=1,
            train_batch_size=6,
            output_dir=folder / f"run-{how}-{os.environ['WORLD_SIZE']}",
            progress=None,
            writers=(),
            report=False,
            checkpointer_args=ts.DefaultCheckpointerArguments(checkpoint=False),  # a save gathers tensors
            init_weights_from=folder / "weights" if how == "files" else None,
            init_weights_strict=how == "files",
        )
        module = _Module(model, nn.MSELoss(), "adamw", data)
        trainer = ts.Trainer(module, args)
        assert trainer.plan.total_steps == 1
        start = peak.take()
        trainer.train()
        step = peak.take()
    states = (one for state in trainer.optimizers[0].state.values() for one in state.values())
    sizes = [_bytes(module.parameters()), module.gradients, _bytes(states), start, step]
    (folder / f"{trainer.world.rank}.json").write_text(json.dumps(sizes))
    trainer.close()


def _bytes(tensors: Iterable[Any]) -> int:
    """The size of the local parts."""
    parts = [getattr(one, "_local_tensor", one) for one in tensors if isinstance(one, Tensor)]
    return sum(part.nbytes for part in parts)


class _Peak:
    """The largest growth of the private memory of a process since the start, sampled every 2 ms."""

    def __enter__(self) -> _Peak:
        self._base, self._most, self._ends = _own_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.is_set():
            self._most = max(self._most, _own_bytes() - self._base)
            time.sleep(0.002)

    def take(self) -> int:
        """The peak since the last call."""
        most, self._most = self._most, 0
        return most


def _own_bytes() -> int:
    """Memory of this process without mapped files."""
    return int(memory("RssAnon") * MIB)
