"""Kill ranks that write sharded checkpoints, at random moments, and check their files.

    python -m tools.kills.sharded                        60 SIGKILLs
    python -m tools.kills.sharded --kills 6 --seed 3     fewer, at other moments

Every second kill hits one rank first and then the others, as a launcher does; the other kills hit all ranks at once.
Runs save in the foreground and in the background. After each kill every checkpoint is verified, and none that was
reported as safe may be missing; then the run continues from the newest. The exit status is 1 if one is damaged or
missing, or if a run does not end with the bits of an unbroken one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import trainstack as ts
from tests.helpers.processes import free_port
from tools.kills.__main__ import LATER
from tools.kills.training import Heavy
from tools.ranks.pool import world_environment
from trainstack.checkpointing import list_checkpoints, verify_checkpoint
from trainstack.checkpointing.temp_dirs import TEMPORARY

SIZE = 3
"""The number of ranks."""
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
    """Train `Heavy` in `place` as one rank; rank 0 records each safe checkpoint, and the final weights."""
    os.environ.update(environment)
    said = os.open(Path(place) / f"rank-{environment['RANK']}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 2)  # ranks that survive another one print much
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
    weights = [p.full_tensor().detach() for p in module.parameters()]
    if environment["RANK"] == "0":
        torch.save(weights, Path(place) / "end.pt")
    trainer.close()


def run(place: Path, kills: int, seed: int) -> Result:
    """Kill `kills` times in two runs in folders of `place`, and compare both with an unbroken run."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the server reads it when it imports torch
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
    environments = world_environment(SIZE, free_port())
    ranks = [context.Process(target=train, args=(str(folder), async_save, one)) for one in environments]
    for rank in ranks:
        rank.start()
    return ranks


def _strike(draw: random.Random, folder: Path, ranks: list[Any], before: int, *, alone: bool) -> bool:
    """Wait for some checkpoints, and kill; returns whether the run had ended."""
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
    """Verify all checkpoints; returns the step of the newest."""
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
    """Run the battery; returns the exit status."""
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
