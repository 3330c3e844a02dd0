"""Start two jobs in one run directory, many times, and check that one owns it and that nothing is lost.

`make two-jobs`, or `python -m tools.two_jobs --cases 50 --seed 0`. Jobs are killed, or stopped beyond their lease and
continued; wall clocks jump. After each case every checkpoint is intact and of one run, the run has ended with the bits
of an undisturbed one, and each unfinished job has printed the reason in one message.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts
from trainstack.checkpointing import directory as listing

LEASE_S = 1.5
STEPS = 40
STEP_S = 0.03


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process that trains, and the file with its messages."""

    pid: int
    log: Path

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, limit_s: float = 90.0) -> int:
        """Wait for its end; returns the exit code, -9 after a kill.

        Raises:
            AssertionError: it has not ended within `limit_s`.
        """
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        self.send(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"a job did not end within {limit_s:g} s:\n{self.log.read_text()}")


class Slow(ts.SupervisedModule):
    """A training of some seconds, so that there is time for a second job."""

    step_s = 0.0

    def on_end_train_step(self, global_step: int) -> None:
        """Take some time."""
        time.sleep(self.step_s)


def train(folder: Path, *, step_s: float, async_save: bool = False) -> None:
    """Train to the end, from the newest checkpoint in `folder`."""
    ts.seed_everything(1)
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 1))
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randn(STEPS * 4, 1))
    module = Slow(net, nn.MSELoss(), "adam", data)
    module.step_s = step_s
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1, async_save=async_save)
    arguments = ts.TrainerArguments(
        epochs=1,
        train_batch_size=4,
        resume="auto",
        output_dir=str(folder),
        writers=[],
        report=False,
        progress="none",
        lease_timeout_s=LEASE_S,
        checkpointer_args=saving,
    )
    ts.Trainer(module, arguments).train()


def start(folder: Path, log: Path, *, jumps: list[float], async_save: bool) -> Job:
    """Start a job whose wall clock has the offsets `jumps` in turn, each for a quarter of a second."""
    pid = os.fork()
    if pid:
        return Job(pid=pid, log=log)
    code = 1
    try:
        with log.open("w", buffering=1) as file:
            logging.basicConfig(stream=file, level=logging.WARNING, force=True)
            clock, began = time.time, time.monotonic()
            time.time = lambda: clock() + jumps[int((time.monotonic() - began) * 4) % len(jumps)]
            try:
                train(folder, step_s=STEP_S, async_save=async_save)
                code = 0
            except ts.LeaseError as error:
                file.write(f"REFUSED {error}\n")
                code = 3
            except BaseException as error:
                file.write(f"FAILED {type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def until_saved(folder: Path, count: int, job: Job) -> None:
    """Wait until the run has saved step `count`."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        found = listing.scan(folder / "checkpoints").intact
        if found and (found[0].global_step or 0) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {count} was not saved:\n{job.log.read_text()}")


def at_once(first: Job, begin: Callable[[], Job], folder: Path, dice: random.Random) -> list[int]:
    """Both jobs start at the same time."""
    second = begin()
    return [first.wait(), second.wait()]


def in_the_middle(first: Job, begin: Callable[[], Job], folder: Path, dice: random.Random) -> list[int]:
    """The second job starts while the first one trains."""
    until_saved(folder, dice.randint(1, 20), first)
    second = begin()
    return [first.wait(), second.wait()]


def killed(first: Job, begin: Callable[[], Job], folder: Path, dice: random.Random) -> list[int]:
    """The first job is killed, and the second one starts immediately."""
    until_saved(folder, dice.randint(1, 20), first)
    time.sleep(dice.random() * STEP_S)
    first.send(signal.SIGKILL)
    second = begin()
    return [first.wait(), second.wait()]


def stopped(first: Job, begin: Callable[[], Job], folder: Path, dice: random.Random) -> list[int]:
    """The first job is stopped beyond its lease, and continued while the second one trains or after its end."""
    until_saved(folder, dice.randint(1, 20), first)
    time.sleep(dice.random() * STEP_S)
    first.send(signal.SIGSTOP)
    reached = (listing.scan(folder / "checkpoints").intact[0].global_step or 0) + dice.randint(1, 8)
    second = begin()
    codes = [0, 0]
    if dice.random() < 0.5:
        until_saved(folder, reached, second)
        first.send(signal.SIGCONT)
        codes[1] = second.wait()
    else:
        codes[1] = second.wait()
        first.send(signal.SIGCONT)
    codes[0] = first.wait()
    return codes


def stopped_for_a_moment(first: Job, begin: Callable[[], Job], folder: Path, dice: random.Random) -> list[int]:
    """The first job is stopped for less than its lease; the second one is refused."""
    until_saved(folder, dice.randint(1, 20), first)
    first.send(signal.SIGSTOP)
    second = begin()
    time.sleep(LEASE_S / 4)
    first.send(signal.SIGCONT)
    return [first.wait(), second.wait()]


EXPECTED: dict[Callable[..., list[int]], tuple[tuple[int, int], ...]] = {
    at_once: ((0, 3), (3, 0)),
    in_the_middle: ((0, 3),),
    killed: ((-9, 0),),
    stopped: ((3, 0),),
    stopped_for_a_moment: ((0, 3),),
}
"""The scenarios, and the exit codes of both jobs: 0 for the end of the training, 3 for a refusal."""


def run_case(number: int, seed: int, reference: dict[str, Any], root: Path) -> str:
    """Run one case and check the files; returns the name of its scenario.

    Raises:
        AssertionError: a checkpoint is lost or belongs to another run, or a message is missing.
    """
    dice = random.Random(f"{seed}/{number}")
    scenario = list(EXPECTED)[number % len(EXPECTED)]
    folder = root / str(number)
    jumps = [[0.0], [0.0, 7200.0], [0.0, -7200.0, 86400.0], [5.0, -5.0]]
    asked: dict[str, Any] = {"async_save": dice.random() < 0.3}

    def begin(name: str) -> Job:
        return start(folder, root / f"{number}-{name}.log", jumps=dice.choice(jumps), **asked)

    first = begin("first")
    codes = scenario(first, lambda: begin("second"), folder, dice)
    logs = [(root / f"{number}-{name}.log").read_text() for name in ("first", "second")]
    about = f"case {number} ({scenario.__name__}, seed {seed}): exit codes {codes}\n" + "\n---\n".join(logs)
    assert tuple(codes) in EXPECTED[scenario], about
    for code, log in zip(codes, logs, strict=True):
        said = [line for line in log.splitlines() if line.startswith(("REFUSED", "FAILED"))]
        assert len(said) == (code == 3), about
        assert all("process" in line and " on " in line for line in said), about
    check_folder(folder / "checkpoints", reference, about)
    return scenario.__name__


def check_folder(folder: Path, reference: dict[str, Any], about: str) -> None:
    """Check that all checkpoints are intact, of one run, in the order of leases, and that the last has `reference`."""
    contents = listing.scan(folder)
    assert not contents.broken, about
    assert not contents.odd, about
    assert not [path for path in folder.iterdir() if path.name.startswith((".tmp-checkpoint", ".old-"))], about
    for info in contents.intact:
        ts.checkpointing.verify_checkpoint(info.path)
    assert len(contents.begun) == 1, about
    assert len({info.run_id for info in (*contents.begun, *contents.intact)}) == 1, about
    leases = [info.lease for info in contents.intact]
    assert leases == sorted(leases, reverse=True), about
    assert contents.intact[0].global_step == STEPS, about
    newest = next(info for info in contents.intact if info.kind == "checkpoint")
    state = ts.read_checkpoint(newest.path).module_interface_state or {}
    assert all(torch.equal(value, reference[name]) for name, value in state.items()), about


def undisturbed(folder: Path) -> dict[str, Any]:
    """The final weights of a run without a second job."""
    train(folder, step_s=0.0)
    newest = next(info for info in listing.scan(folder / "checkpoints").intact if info.kind == "checkpoint")
    return ts.read_checkpoint(newest.path).module_interface_state or {}


def campaign(cases: int, seed: int, say: Callable[[str], None]) -> Counter[str]:
    """Run `cases` cases; returns the number of cases of each scenario."""
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="two-jobs-") as name:
        root = Path(name)
        reference = undisturbed(root / "reference")
        for number in range(cases):
            done[run_case(number, seed, reference, root)] += 1
            say(f"case {number + 1} of {cases}: passed")
    return done


def main() -> int:
    """Run the campaign with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    done = campaign(given.cases, given.seed, lambda line: print(line, file=sys.stderr, flush=True))
    print(f"{given.cases} cases, seed {given.seed}, {time.monotonic() - began:.0f} s: no checkpoint lost or foreign")
    for name, count in sorted(done.items()):
        print(f"  {name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
