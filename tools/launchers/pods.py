"""Start ranks without a launcher: with torchrun's variables, or with the four variables of a pod."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.helpers.processes import free_port
from tools.launchers.slurm_node import ROOT

LIMIT_S = 180.0


def run(folder: Path, ranks: int, *, as_pods: bool = False, epochs: int = 4) -> str:
    """Train in `folder/run`; returns the digest of the weights, with the number of steps and ranks.

    Args:
        folder: for the run, and for the output of each rank.
        ranks: the number of ranks.
        as_pods: omit LOCAL_RANK and LOCAL_WORLD_SIZE.
        epochs: the number of epochs of 12 steps.

    Raises:
        RuntimeError: a rank has failed.
    """
    port = free_port()
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": port}
        if not as_pods:
            place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "TRAINING_BACKEND": "ddp",
            **{name: str(value) for name, value in place.items()},
        }
        command = [sys.executable, "-m", "tools.launchers.training", f"--output={folder / 'run'}", f"--epochs={epochs}"]
        with (folder / f"rank{rank}").open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError("".join((folder / f"rank{rank}").read_text() for rank in range(ranks)))
    return (folder / "run" / "digest").read_text()
