"""A training over two ranks of which one fails: `-m tests.helpers.failing_run FOLDER HOW WHERE CULPRIT`.

Each rank writes its process number at its start, and the culprit the time at which it fails. `measure` starts such a
run under one of three launchers and returns how long the other rank continued.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT_S, GRACE_S = float(os.environ.get("TIMEOUT_S", "6")), 3.0
ROOT = Path(__file__).resolve().parents[2]

HOWS = (
    "RuntimeError",
    "custom",
    "BaseException",
    "MemoryError",
    "sys.exit",
    "_exit(0)",
    "_exit(7)",
    "SIGKILL",
    "SIGSEGV",
    "SIGTERM",
    "SIGSTOP",
    "sleep",
    "GIL",
)
STUCK = ("SIGSTOP", "sleep", "GIL")
"""The culprit itself does not end; a launcher has to end it."""

PLACES = (
    "import",
    "before",
    "constructor",
    "optimizers",
    "loader",
    "dataset",
    "train_step",
    "hook",
    "val_step",
    "val_hook",
    "save",
    "end",
    "export",
)
LAUNCHERS = ("plain", "torchrun", "launch")


class Odd(Exception):
    """Cannot be made from its message alone."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Base(BaseException):
    """Not an `Exception`."""


def fail(how: str) -> None:
    raised: dict[str, Any] = {
        "RuntimeError": RuntimeError("fails"),
        "custom": Odd(1, 2),
        "BaseException": Base("fails"),
        "MemoryError": MemoryError(),
        "sys.exit": SystemExit(3),
    }
    if how in raised:
        raise raised[how]
    if how.startswith("_exit"):
        os._exit(int(how[6]))
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "sleep":
        time.sleep(600)
    else:
        ctypes.PyDLL(None).sleep(600)  # unlike CDLL it keeps Python's lock


def main(folder: Path, how: str, where: str, culprit: int) -> None:
    rank = int(os.environ["RANK"])
    (folder / f"{rank}.pid").write_text(str(os.getpid()))

    def come(place: str) -> None:
        if place == where and rank == culprit and not (folder / "failed").exists():
            new = folder / "failed.new"
            new.write_text(str(time.time()))
            new.replace(folder / "failed")
            fail(how)

    come("import")
    train(folder, come)


def train(folder: Path, come: Any) -> None:
    import trainstack as ts
    from tests.helpers.modules import Classifier, arguments, numbers

    class Data:
        def __init__(self) -> None:
            self.base = numbers(24)

        def __len__(self) -> int:
            return len(self.base)

        def __getitem__(self, index: int) -> Any:
            come("dataset")
            return self.base[index]

    class Fails(Classifier):
        def __init__(self) -> None:
            come("constructor")
            super().__init__(Data(), validate=True)  # type: ignore[arg-type]

        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
            come("optimizers")
            return super().get_optimizers_schedulers(estimated_global_steps_per_epoch, epochs)

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            come("loader")
            return super().get_train_dataloader(sampler, batch_size)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            come("train_step")
            return super().train_step(global_step, batch, device)

        def on_end_train_step(self, global_step: int) -> None:
            come("hook")

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            come("val_step")
            return super().val_step(global_step, batch, device)

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            come("val_hook")

        def get_state(self) -> Any:
            come("save")
            return super().get_state()

        def on_end_train(self, global_step: int) -> None:
            come("end")

    # A busy machine imports for longer than TIMEOUT_S. The ranks meet after it, unless one has failed.
    (folder / f"{os.environ['RANK']}.imported").touch()
    while len(list(folder.glob("*.imported"))) < 2 and not (folder / "failed").exists():
        time.sleep(0.02)
    come("before")
    options = {"ddp": {"timeout_s": TIMEOUT_S}}
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    made = arguments(folder / "run", backend="ddp", backend_options=options, checkpointer_args=saving, epochs=2)
    trainer = ts.Trainer(Fails(), made)
    trainer.on(ts.Event.SAVE_MODEL)(lambda: come("export"))
    trainer.train()
    trainer.close()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def measure(folder: Path, launcher: str, how: str, where: str, culprit: int, port: int, limit: float) -> dict[str, Any]:
    """Seconds from the failure until the other rank had ended, and until all had; and the output.

    Both are None if the limit expired, and -1 if the run ended without the failure.

    Args:
        folder: an empty one.
        launcher, how, where, culprit: of `LAUNCHERS`, `HOWS` and `PLACES`; the rank that fails.
        port: a free one.
        limit: seconds after which all is ended; then the times are None.
    """
    words = ["-m", "tests.helpers.failing_run", str(folder), how, where, str(culprit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    commands = [[sys.executable, *words]] * 2
    if launcher != "plain":
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del environment[name]
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        commands = [[sys.executable, *agent, *words] if launcher == "torchrun" else [sys.executable, *words, "launch"]]
    ranks = []
    with (folder / "printed").open("wb") as printed:
        for rank, command in enumerate(commands):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if launcher == "plain" else {}
            made = {**environment, **place}
            ranks.append(
                subprocess.Popen(command, cwd=ROOT, env=made, stdout=printed, stderr=printed, start_new_session=True)
            )
    try:
        times = _follow(folder, ranks, how in STUCK and launcher == "plain", culprit, time.monotonic() + limit)
    finally:
        for process in ranks:
            for pid in [*_pids(folder), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return {**times, "printed": (folder / "printed").read_text(errors="replace")}


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in folder.glob("*.pid") if _is_running(int(path.read_text() or 0))]


def _follow(folder: Path, ranks: list[Any], stays: bool, culprit: int, deadline: float) -> dict[str, float | None]:
    times: dict[str, float | None] = {"other_s": None, "all_s": None}
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if not (folder / "failed").exists():
            if all(process.poll() is not None for process in ranks):
                return {"other_s": -1.0, "all_s": -1.0}
            continue
        since = time.time() - float((folder / "failed").read_text())
        running = {path.stem for path in folder.glob("*.pid") if _is_running(int(path.read_text() or 0))}
        if str(1 - culprit) not in running and times["other_s"] is None:
            times["other_s"] = round(since, 1)
        over = len(ranks) == 1 and ranks[0].poll() is not None
        if not running - ({str(culprit)} if stays else set()) and (over or len(ranks) == 2):
            return {**times, "all_s": round(since, 1)}
    return times


if __name__ == "__main__":
    target, (how, where, culprit, *rest) = Path(sys.argv[1]), sys.argv[2:]
    if rest:
        import trainstack

        trainstack.launch(main, target, how, where, int(culprit), nproc=2, grace_s=GRACE_S)
    else:
        main(target, how, where, int(culprit))
