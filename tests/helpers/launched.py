"""Functions that the tests of `launch` run in its processes."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import trainstack as ts
from trainstack import ranks


def rank() -> int:
    return int(os.environ["RANK"])


def train_and_leave_carelessly(offset: int) -> dict[str, Any]:
    """DDP on gloo, the group destroyed while DDP still holds it: such processes often abort when they exit."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((3, 4), float(rank()))).sum().backward()
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    result = {
        "rank": dist.get_rank(),
        "total": total,
        "gradient": model.module.weight.grad,
        "threads": os.environ["OMP_NUM_THREADS"],
        "given": os.environ["GIVEN"],
        "pid": os.getpid(),
    }
    dist.destroy_process_group()
    return result


def raise_in_rank_1(pids: Path) -> None:
    """Rank 0 ignores SIGTERM, as if it were stuck in a collective."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (pids / str(os.getpid())).touch()
    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == 1:
        raise KeyError("the origin")
    time.sleep(60)


def kill_rank_1() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def abort_at_exit(calls: Path) -> int:
    atexit.register(os.abort)
    (calls / f"{rank()}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    return rank()


def hang() -> None:
    """Hang in a different way on each rank."""
    if rank() == 0:
        time.sleep(600)
    if rank() == 1:
        ctypes.PyDLL(None).sleep(600)  # unlike CDLL it keeps Python's lock
    os.kill(os.getpid(), signal.SIGSTOP)


def fall_twice(how: str = "between") -> tuple[int, float]:
    """Another rank is killed at each of the first two starts."""
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < 2 and (how == "all" or (how == "before" and rank() == start % 2)):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if start < 2 and rank() == start % 2 and how == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if start < 2 and rank() == start % 2 and how == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    return start, total.item()


def talk() -> None:
    print(f"out of {rank()}")
    print(f"err of {rank()}", file=sys.stderr)
    os.write(1, f"descriptor of {rank()}\n".encode())


def sleep(pids: Path) -> None:
    (pids / str(os.getpid())).touch()
    time.sleep(60)


def draw_and_return_a_lambda() -> Any:
    return lambda: random.random()


def leave_by_exit(code: int | None) -> None:
    sys.exit(code)


def exchange_with_a_returned_host() -> list[str]:
    """Rank 1 has been started once, by an agent that has just joined; rank 0 for the fourth time."""
    changes = {"TORCHELASTIC_RESTART_COUNT": "0" if rank() else "3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with mock.patch.dict(os.environ, changes):
        return ranks.exchange("returned", f"text of {rank()}", timeout_s=5.0)


def ranks_and_order(folder: Path) -> dict[str, Any]:
    """Everything of `trainstack.ranks`, before and after there is a group."""
    said: dict[str, Any] = {"before": only_main("before")}
    dist.init_process_group("gloo")
    said["after"] = only_main("after")
    if rank() == 0:
        only_main("a barrier in it would hang here")
    with ts.main_process_first() as first:
        said["saw the file"] = (folder / "made").exists()
        if first:
            time.sleep(0.3)
            (folder / "made").touch()
    with ts.main_process_first(local=True) as first:
        said["first here"] = first
    said["main raises"] = caught(0)
    said["rank 1 raises"] = caught(1)
    with ts.main_process_first() as first:  # it works again after errors
        said["first"] = first
    said["exchange"] = ranks.exchange("test", f"text of {rank()}")
    said["exchange of a returned host"] = exchange_with_a_returned_host()
    said["place"] = ts.process_info_of_group()
    talk()
    ts.print_once("once in the world")
    ts.print_once("once a node", once="node")
    dist.destroy_process_group()
    return said


@ts.rank_zero_only
def only_main(text: str) -> str:
    return f"{text} in {rank()}"


def caught(who: int) -> str | None:
    try:
        with ts.main_process_first():
            if rank() == who:
                raise OSError("no space left")
    except (OSError, ts.TrainstackError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def train_in_the_default_folder(directory: str, *, is_killed: bool) -> tuple[str, int]:
    """A training in a folder below `directory`, whose rank 0 is killed after the third step if `is_killed`."""
    from tests.helpers.modules import Classifier, numbers

    os.chdir(directory)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    args = ts.TrainerArguments(
        train_batch_size=8, epochs=2, log_every=1, progress="none", backend="ddp", resume="auto", writers=["csv"],
        checkpointer_args=saving,
    )  # fmt: skip
    trainer = ts.Trainer(Classifier(numbers(16)), args)

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def kill(_: ts.Trainer, step: int) -> None:
        if is_killed and trainer.state.global_step == 3 and rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.train()
    found = str(trainer.output_dir), trainer.state.global_step
    trainer.close()
    return found
