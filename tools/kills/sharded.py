"""Kill ranks that write sharded checkpoints at random moments, and look at their files.

    python -m tools.kills.sharded                        60 SIGKILLs
    python -m tools.kills.sharded --kills 6 --seed 3     fewer, at other moments

Every second kill strikes one rank, and a moment later the others, as a launcher does; the other kills strike all ranks
at once. Runs save in the foreground and in the background. After each kill every checkpoint is read, byte by byte, and
none that was reported as safe may be missing; then the run continues from the newest. Exit code 1 if one is damaged or
missing, or if a run does not end with the bits of an unbroken one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import trainstack as ts
from tools.kills.__main__ import LATER
from tools.kills.training import Heavy
from tools.ranks.pool import world_environment
from trainstack.checkpointing import list_checkpoints, verify_checkpoint
from trainstack.checkpointing.temp_dirs import TEMPORARY

SIZE = 3
"""Ranks."""
STEPS = 75
SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
TIMEOUT_S = 120.0


class Result(NamedTuple):
    """The results of the kills."""

    kills: int
    while_writing: int
    committed: int
    problems: list[str]


def train(place: str, async_save: bool, environment: dict[str, str]) -> None:
    """Train `Heavy` in `place` as one rank; rank 0 notes each checkpoint that is safe, and the digest at the end."""
    os.environ.update(environment)
    said = os.open(Path(place) / f"rank-{environment['RANK']}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 2)  # those that survive another rank say much
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Heavy()
    args = ts.TrainerArguments(
        epochs=3,
        max_steps=STEPS,
        train_batch_size=15,
        val_batch_size=100,
        backend="fsdp",
        device="cpu",
        resume="auto",
        output_dir=place,
        checkpointer_args=ts.DefaultCheckpointerArguments(
            every_n_steps=2, keep_last=3, sharded=True, async_save=async_save, verify="none"
        ),
        writers=[],
        progress="none",
        log_level="ERROR",
    )
    trainer, notes = ts.Trainer(module, args), Path(place) / "safe"

    @trainer.on(ts.Event.CHECKPOINT_SAVED)
    def note(_: Any, path: Any) -> None:
        with notes.open("a") as file:
            file.write(f"{Path(path).name}\n")

    trainer.train()
    digest = [p.full_tensor().detach() for p in module.parameters()]
    if environment["RANK"] == "0":
        torch.save(digest, Path(place) / "end.pt")
    trainer.close()


def run(place: Path, kills: int, seed: int) -> Result:
    """Kill so many times under `place`, in two runs, and compare both with an unbroken run."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported there
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.kills.training", *LATER, *SHARDING])
    draw, struck, writing, problems = random.Random(seed), 0, 0, list[str]()
    unbroken = place / "unbroken"
    _finish(context, unbroken, False, problems)
    for async_save in (False, True):
        folder, last = place / ("background" if async_save else "foreground"), 0
        while struck < (kills if async_save else kills // 2):
            before = len(_safe(folder))
            ranks = _start(context, folder, async_save)
            ended = _strike(draw, folder, ranks, before, alone=struck % 2 == 0)
            struck += 1
            writing += any(path.name.startswith(TEMPORARY) for path in (folder / "checkpoints").glob(".*"))
            last = _inspect(folder, last, problems)
            if ended:
                shutil.rmtree(folder)
                last = 0
        _finish(context, folder, async_save, problems)
        if not problems and not _equal(folder, unbroken):
            problems.append(f"{folder.name}: the run ended with other bits than an unbroken one")
    return Result(struck, writing, sum(len(_safe(place / name)) for name in ("foreground", "background")), problems)


def _start(context: Any, folder: Path, async_save: bool) -> list[Any]:
    folder.mkdir(exist_ok=True)
    with socket.socket() as listener:  # a port that is free now
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environments = world_environment(SIZE, port)
    ranks = [context.Process(target=train, args=(str(folder), async_save, one)) for one in environments]
    for rank in ranks:
        rank.start()
    return ranks


def _strike(draw: random.Random, folder: Path, ranks: list[Any], before: int, *, alone: bool) -> bool:
    """Wait for some checkpoints, and kill; whether the run had ended."""
    wanted, deadline = before + draw.randrange(0, 6), time.monotonic() + TIMEOUT_S
    while len(_safe(folder)) < wanted and all(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(draw.uniform(0.0, 0.05))
    ended = not all(rank.is_alive() for rank in ranks)
    if alone:
        draw.choice(ranks).kill()
        time.sleep(draw.choice([0.0, 0.01, 0.1, 1.0]))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
    return ended


def _inspect(folder: Path, last: int, problems: list[str]) -> int:
    """Verify all checkpoints; the step of the newest checkpoint."""
    found = (
        [one for one in list_checkpoints(folder / "checkpoints") if one.kind == "checkpoint"]
        if (folder / "checkpoints").is_dir()
        else []
    )
    for info in found:
        try:
            verify_checkpoint(info.path)
        except ts.CheckpointError as error:
            problems.append(str(error))
    newest = max((info.global_step or 0 for info in found), default=0)
    safe = _safe(folder)
    promised = max([last, *(int(name.rpartition("-")[2]) for name in safe)])
    if newest < promised:
        problems.append(f"{folder.name}: a checkpoint at step {promised} was safe, and the newest is at {newest}")
    return newest


def _safe(folder: Path) -> list[str]:
    file = folder / "safe"
    return file.read_text().split("\n")[:-1] if file.exists() else []


def _finish(context: Any, folder: Path, async_save: bool, problems: list[str]) -> None:
    ranks = _start(context, folder, async_save)
    for rank in ranks:
        rank.join(TIMEOUT_S)
        if rank.exitcode != 0:
            problems.append(f"{folder.name}: a rank ended with {rank.exitcode}")
            rank.kill()
    left = [path.name for path in (folder / "checkpoints").glob(f"{TEMPORARY}*")]
    if left:
        problems.append(f"{folder.name}: {left} was not cleared")


def _equal(one: Path, other: Path) -> bool:
    first, second = (torch.load(path / "end.pt", weights_only=True) for path in (one, other))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Run all of it; the exit code."""
    parser = argparse.ArgumentParser(prog="tools.kills.sharded", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args(arguments)
    place, begin = Path(tempfile.mkdtemp(prefix="trainstack-sharded-")), time.monotonic()
    found = run(place, given.kills, given.seed)
    print(
        f"{found.kills} kills of {SIZE} ranks, {found.while_writing} of them while a checkpoint was written; "
        f"{found.committed} checkpoints were safe; {time.monotonic() - begin:.0f} s"
    )
    print(
        "\n".join(found.problems) or "none was damaged or missing, and the runs ended with the bits of an unbroken one"
    )
    if not found.problems:
        shutil.rmtree(place)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
