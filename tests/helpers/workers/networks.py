"""Ranks whose connection to the store is cut, that fail while groups are made, and their ports."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.proxy import Proxy
from tests.helpers.workers import RANK


def listening(process: int | str = "self") -> list[str]:
    """The addresses, in hexadecimal, on which a process listens for TCP."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def sockets() -> Any:
    """The ports of a rank while it trains."""
    trainer = ts.Trainer(Classifier(numbers(8)), arguments("unused", backend="ddp"))
    trainer.train()
    found = listening()
    variable = os.environ.get("GLOO_SOCKET_IFNAME")
    trainer.close()
    return {"listens": found, "during": variable, "after": os.environ.get("GLOO_SOCKET_IFNAME")}


def launched() -> Any:
    """The ports of a process of `launch`, and of the agent that has started it."""
    found = [*sockets()["listens"], *listening(os.getppid())]
    return {"listens": found, "token": len(os.environ["TRAINSTACK_TOKEN"])}


def fails_in_open(culprit: int, how: str) -> Any:
    """One rank fails after the rendezvous and before the groups are made."""
    start = time.monotonic()
    device = "cuda" if culprit == RANK and how == "device" else "cpu"
    if culprit == RANK and how == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "eth99"
    if culprit == RANK and how == "killed":
        join = dist.init_process_group
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL) and join
    try:
        ts.build_trainer_backend("ddp", ddp={"rendezvous_timeout_s": 60.0 if how != "killed" else 2.0}).open(device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    return {"error": None}


def proxy_of_store() -> Proxy:
    """Connect to the store, which rank 0 hosts, through a proxy from now on."""
    while True:
        try:
            proxy = Proxy(int(os.environ["MASTER_PORT"]))
            proxy.check()
            os.environ["MASTER_PORT"] = str(proxy.port)
            return proxy
        except OSError:
            time.sleep(0.05)


def cut_off(how: str, timeout_s: float, sleep_s: float = 60.0) -> Any:
    """The network between rank 1 and the store is cut in the third step: connections stay open without data."""
    proxy = proxy_of_store() if RANK == 1 else None
    since = [0.0]

    class Cut(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if global_step != 3:
                return
            since[0] = time.monotonic()
            if proxy is None:
                time.sleep(sleep_s)
                return
            proxy.open.clear()
            if how == "sigterm":
                signal.setitimer(signal.ITIMER_REAL, 0.5)
            if how in ("stop", "sigterm"):
                trainer.request_stop("asked")
            if how == "gather":
                trainer.gather(0)
            if how == "save":
                trainer.save_checkpoint()
            if how == "first":
                with ts.main_process_first(timeout_s=timeout_s):
                    pass

    def handler(number: int, frame: Any) -> None:
        raise InterruptedError("a handler has run")

    signal.signal(signal.SIGALRM, handler)
    options = {"ddp": {"timeout_s": timeout_s}}
    trainer = ts.Trainer(Cut(numbers(64)), arguments("unused", backend="ddp", backend_options=options))
    said = "nothing"
    try:
        trainer.train()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    raised = time.monotonic() - since[0]
    trainer.close()
    return {"error": said, "seconds": raised, "closed": time.monotonic() - since[0]}


def stop_requests(steps: int) -> Any:
    """How often a rank looks in the store for a request to stop, in training and in validation."""
    from trainstack.backends.processes.communicator import GroupCommunicator

    looks, find = [], GroupCommunicator.get_if_all

    def counted(self: Any, names: Any) -> Any:
        if all(name.endswith("/asked") for name in names):  # ranks look in the store for other words too
            looks.append(names)
        return find(self, names)

    GroupCommunicator.get_if_all = counted  # type: ignore[method-assign]
    try:
        options: dict[str, Any] = {"backend": "ddp", "train_batch_size": 2, "val_batch_size": 2, "epochs": 1}
        trainer = ts.Trainer(Classifier(numbers(2 * steps), validate=True), arguments("unused", **options))
        start = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - start
    finally:
        GroupCommunicator.get_if_all = find  # type: ignore[method-assign]
    return {"looks": len(looks), "seconds": seconds, "steps": trainer.global_steps_finished}


def over_hosts(folder: str, timeout_s: float = 30.0, how: str = "train", **options: Any) -> Any:
    """Train on several hosts; a file says when the third step is finished, after which steps are slow."""
    variable = options.pop("interface_of_rank_1", None)
    if variable is not None and RANK == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = variable

    class Slow(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if how != "train" and global_step >= 3:
                Path(folder, f"{RANK}.step").touch()
                time.sleep(0.1)

    begin = time.monotonic()
    backend_options = {"ddp": {"timeout_s": timeout_s}}
    module = Slow(numbers(64 if how == "train" else 4000))
    args = arguments("unused", backend="ddp", backend_options=backend_options, train_batch_size=12)
    trainer = ts.Trainer(module, args)
    said, ended = "", 0.0
    try:
        trainer.train()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    step = Path(folder, "cut")
    ended = time.time() - (step.stat().st_mtime if step.exists() else time.time())
    gloo = os.environ.get("GLOO_SOCKET_IFNAME")
    return {
        "error": said,
        "after_cut": ended,
        "seconds": time.monotonic() - begin,
        "weights": [p.detach().sum().item() for p in module.parameters()],
        "interface": gloo,
    }
