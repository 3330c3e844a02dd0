"""torchrun on two hosts, `--nnodes=1:2`: one host is lost, the other continues; the lost one returns."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.hosts import Hosts
from tools.launchers.slurm_node import ROOT, wait_for
from tools.launchers.training import samples_of_steps

LIMIT_S = 180.0
COMMAND = (
    "--nnodes=1:2 --nproc-per-node=1 --max-restarts=5 --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29400 "
    "--rdzv-id=run-1 --rdzv-conf=last_call_timeout=3 --local-addr=10.77.0.{host} -m tools.launchers.training"
)
"""The program of both hosts; without `last_call_timeout` each start waits 30 seconds for another host."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run on two hosts.

    Attributes:
        digest: the digest of the weights, with the number of steps and ranks.
        samples: the samples of each step.
        seconds: the time from the loss of a host to the next start of the ranks.
        output: the output of each host.
    """

    digest: str
    samples: dict[int, list[int]]
    seconds: float
    output: tuple[str, ...]


def run_on_two_hosts(folder: Path, *, lost_at: int = 16, returns: bool = False) -> Outcome:
    """Train on two hosts, lose the second after a step, and start it again if it `returns`."""
    run = folder / "run"
    hosts = Hosts(2)
    agents = []

    def start(number: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *COMMAND.format(host=number + 1).split()]
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "TRAINING_OUTPUT": str(run),
            "TRAINING_STEP_S": "0.2",
            "TRAINING_EVERY": "5",
            "TRAINING_TIMEOUT_S": "6",
            "TRAINING_EPOCHS": "8" if returns else "4",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        agents.append(hosts.call(number, command, environment, folder / f"host{number}"))

    try:
        start(0)
        start(1)
        wait_for(lambda: lost_at in samples_of_steps(run), LIMIT_S, f"step {lost_at}")
        hosts.lose(1)
        lost = time.monotonic()
        starts = _starts(run)
        wait_for(lambda: _starts(run) > starts, LIMIT_S, "the next start")
        seconds = time.monotonic() - lost
        if returns:
            hosts.plug(1)
            start(1)
        agents[0].wait(LIMIT_S)
        return Outcome(
            digest=(run / "digest").read_text() if (run / "digest").exists() else "",
            samples=samples_of_steps(run),
            seconds=seconds,
            output=tuple((folder / f"host{number}").read_text() for number in range(2)),
        )
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGKILL)
            agent.wait()
        for number in range(2):
            hosts.lose(number)
        hosts.close()


def _starts(run: Path) -> int:
    return len(list(run.glob("samples-*")))
