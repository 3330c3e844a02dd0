"""`python -m tools.bench sharded`: the seconds in which a sharded save blocks the loop, here and in torch.

Two gloo ranks have a model with the state of Adam, divided as by `fully_shard`. In each round every way to save runs
once. A figure is the longest time of a rank; a ratio is the median of the ratios within a round. All ways flush their
files to the disk. Our checkpoints have hashes of all bytes and are atomic; those of `torch.distributed.checkpoint` are
not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes import free_port
from tools.ranks.pool import world_environment

RANKS = 2
BLOCKED = "the loop is blocked"
SAFE = "until it is on the disk"
WAYS = ("ours, background", "torch, async_save", "ours, foreground", "torch, save")
Seconds = dict[str, dict[str, float]]


def main(argv: Sequence[str]) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench sharded", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, default=20, help="parameters of the model in millions (default: 20)")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds (default: 7)")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TRAINSTACK_BENCH_DIR")) as folder:
        rounds = _measure(folder, given.millions, given.rounds)
    print(table(rounds, given.millions))
    return 0


def table(rounds: list[Seconds], millions: int) -> str:
    """Medians in seconds, and ratios to the corresponding way of torch."""
    lines = [
        f"sharded: saving {millions} million parameters with the state of Adam from {RANKS} gloo ranks; "
        f"{len(rounds)} rounds",
        "",
        f"| way | {BLOCKED}, s | of torch | {SAFE}, s | of torch |",
        "|-|-|-|-|-|",
    ]
    for number, way in enumerate(WAYS):
        other, cells = WAYS[number // 2 * 2 + 1], []
        for span in (BLOCKED, SAFE):
            mine, theirs = [one[way][span] for one in rounds], [one[other][span] for one in rounds]
            cells += [f"{median(mine):.3f}", f"{median([a / b for a, b in zip(mine, theirs, strict=True)]):.2f}"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _measure(folder: str, millions: int, rounds: int) -> list[Seconds]:
    command = [sys.executable, "-m", "tools.bench.sharded", folder, str(millions), str(rounds)]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for environment in world_environment(RANKS, free_port())
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    found: list[list[Seconds]] = [json.loads(text.splitlines()[-1]) for text in said]
    return [
        {way: {span: max(rank[number][way][span] for rank in found) for span in (BLOCKED, SAFE)} for way in WAYS}
        for number in range(rounds)
    ]


class _Ranks:
    """The communication of the ranks in a save."""

    longest_s = 600.0

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.raise_if_any, self.put, self.get_if_all = comm.raise_if_any, comm.put, comm.get_if_all

    def on_main(self, function: Callable[[], Any], name: str) -> Any:
        return self._comm.broadcast_outcome(None, function() if self.rank == 0 else None, name)

    def is_broken(self) -> bool:
        return False


def _state(millions: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))

    def tensors() -> dict[str, Any]:
        names = [f"layers.{number}.weight" for number in range(millions)]
        return {
            name: distribute_tensor(torch.randn(1000, 1000), mesh, [Shard(0)], src_data_rank=None) for name in names
        }

    return {"model": tensors(), "exp_avg": tensors(), "exp_avg_sq": tensors()}


def _rank(folder: Path, millions: int, rounds: int) -> list[Seconds]:
    import torch.distributed.checkpoint as dcp

    from trainstack import Checkpoint, DefaultCheckpointer, DefaultCheckpointerArguments
    from trainstack.backends.processes.communicator import GroupCommunicator

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    ranks = _Ranks(GroupCommunicator(dist.new_group(backend="gloo"), store))
    state = _state(millions)
    model, moments = state["model"], {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    writers = {
        asynchronous: DefaultCheckpointer(
            DefaultCheckpointerArguments(
                save_dir=str(folder / f"ours-{asynchronous}"), sharded=True, async_save=asynchronous, keep_last=None
            )
        )
        for asynchronous in (True, False)
    }
    number = 0

    def ours(asynchronous: bool) -> Callable[[], None]:
        checkpoint = Checkpoint(module_interface_state=model, trainer_state=moments, global_step=number)
        writers[asynchronous].save_sharded(checkpoint, number, True, ranks)

        def finish() -> None:  # at the barrier the main process has committed
            writers[asynchronous]._background.wait()
            dist.barrier()

        return finish

    def torchs(asynchronous: bool) -> Callable[[], None]:
        target = folder / f"torch-{asynchronous}"
        if not asynchronous:
            dcp.save(state, checkpoint_id=target)
            return lambda: None
        future = dcp.async_save(state, checkpoint_id=target)
        return lambda: (future.result(), dist.barrier())[1]  # type: ignore[func-returns-value, union-attr]

    found: list[Seconds] = []
    for number in range(rounds + 1):
        seconds: Seconds = {}
        for way, save, asynchronous in zip(WAYS, (ours, torchs) * 2, (True, True, False, False), strict=True):
            dist.barrier()
            began = time.perf_counter()
            finish = save(asynchronous)
            blocked = time.perf_counter() - began
            finish()
            seconds[way] = {BLOCKED: blocked, SAFE: time.perf_counter() - began}
            dist.barrier()
            for old in folder.iterdir() if ranks.rank == 0 else ():  # not counted
                shutil.rmtree(old)
            dist.barrier()
        found += [seconds] if number else []  # the first round is not counted
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
