"""SLURM on this machine: one node, and two partitions; one preempts the other. All files are in one folder."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
MISSING = "it needs root, and SLURM: apt-get install --no-install-recommends slurm-wlm munge"

# A requeued job waits for `cred_expire`, which is 120 seconds by default.
CONFIG = """\
ClusterName=one
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=0
SlurmdParameters=config_overrides
NodeName=localhost CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=low  Nodes=localhost Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=localhost PriorityTier=10 PreemptMode=OFF
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


def can_run() -> bool:
    """Whether SLURM is installed, and this user can start it."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


def wait_for(condition: Callable[[], object], limit_s: float, event: str) -> None:
    """Poll a condition until it is true.

    Raises:
        TimeoutError: it is not true after `limit_s`; the message has `event`.
    """
    ends = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"{event}: not within {limit_s:g} s")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class SlurmNode:
    """A context in which the daemons run, and the commands of SLURM.

    Args:
        folder: for their files; munged requires that only its owner can write in it and in all folders above.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> SlurmNode:
        folder = self._folder
        for name in ("state", "spool", "bin"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        controller, daemon = _free_ports(2)
        (folder / "slurm.conf").write_text(CONFIG.format(controller=controller, daemon=daemon, folder=folder))
        for name, words in {
            "python": '"$@"',
            "trainstack": '-m trainstack "$@"',
            "torchrun": '-m torch.distributed.run "$@"',
        }.items():
            command = folder / "bin" / name
            command.write_text(f"#!/bin/sh\nexec {sys.executable} {words}\n")
            command.chmod(0o755)
        try:
            files = [
                f"--{name}={folder}/munge.{name.partition('-')[0]}"
                for name in ("socket", "pid-file", "seed-file", "log-file")
            ]
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *files)
            wait_for((folder / "munge.socket").exists, 10, "munged")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D", "-N", "localhost")
            wait_for(lambda: "idle" in self.call("sinfo", "-h", "-o", "%T", check=False), 60, "a node that is idle")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call("scancel", "--user=root", check=False)
        self._stop()

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.log").open("wb") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def call(self, *command: str, check: bool = True, **variables: str) -> str:
        """Run a command of SLURM; returns its output."""
        ended = subprocess.run(
            command, env=self.environment | variables, capture_output=True, text=True, timeout=120, check=False
        )
        if check and ended.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr}")
        return ended.stdout

    def submit(self, script: Path, *options: str, **variables: str) -> str:
        """Submit a batch script; returns the number of the job."""
        return self.call("sbatch", "--parsable", *options, str(script), **variables).strip()

    def fields(self, job: str) -> dict[str, str]:
        """SLURM's description of a job: JobState, Restarts, ExitCode and more."""
        words = self.call("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def end(self, job: str, limit_s: float) -> dict[str, str]:
        """Wait until a job has ended; returns SLURM's description of it.

        Raises:
            TimeoutError: it has not ended after `limit_s`.
        """
        wait_for(lambda: self.fields(job)["JobState"] in ENDED, limit_s, f"the end of job {job}")
        return self.fields(job)
