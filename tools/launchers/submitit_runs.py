"""submitit: two tasks of its local executor, and a preemption under its SLURM executor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import submitit

import trainstack as ts
from tools.launchers.slurm_node import SlurmNode, wait_for
from tools.launchers.training import Network, digest, samples_of_steps

LIMIT_S = 240.0


class Training:
    """The function that submitit calls, also after a preemption.

    Args:
        folder: the output_dir.
        step_s: seconds of sleep in each step.
    """

    def __init__(self, folder: Path, step_s: float = 0.0) -> None:
        self.folder, self.step_s = folder, step_s

    def __call__(self) -> str:
        """Train in one task; returns the digest of the weights."""
        ts.seed_everything(0)
        args = ts.TrainerArguments(
            backend="ddp",
            device="cpu",
            epochs=4,
            train_batch_size=8,
            val_batch_size=8,
            output_dir=self.folder,
            resume="auto",
            progress="none",
        )
        trainer = ts.Trainer(Network(self.folder, step_s=self.step_s), args)
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's
        signal.signal(signal.SIGUSR2, lambda *_: signal.raise_signal(signal.SIGUSR1))
        try:
            trainer.train()
        except ts.Preempted:  # all tasks have saved
            if callable(requeue):
                requeue(signal.SIGUSR2, None)
            raise
        trainer.close()
        return digest(trainer.module)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """The function that submitit runs after the preemption."""
        return submitit.helpers.DelayedSubmission(self)


def run_locally(folder: Path) -> list[str]:
    """Run two tasks of the local executor; returns their results."""
    (folder / "run").mkdir()
    executor = submitit.LocalExecutor(folder=folder / "submitit")
    executor.update_parameters(tasks_per_node=2, timeout_min=5)
    return list(executor.submit(Training(folder / "run")).results())


def run_in_slurm(node: SlurmNode, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Run a job that gets SIGUSR2 at step 20; returns its description by SLURM, and the results of its tasks."""
    run = folder / "run"
    run.mkdir()
    os.environ.update(
        {name: node.environment[name] for name in ("SLURM_CONF", "PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
    )
    executor = submitit.SlurmExecutor(folder=folder / "submitit", max_num_timeout=3)
    executor.update_parameters(nodes=1, ntasks_per_node=2, time=30, signal_delay_s=300)
    job = executor.submit(Training(run, step_s=0.1))
    wait_for(lambda: 20 in samples_of_steps(run), LIMIT_S, "step 20")
    node.call("scancel", "-s", "USR2", str(job.job_id))
    ended = node.end(str(job.job_id), LIMIT_S)
    return ended, [task.result() for task in (job.task(0), job.task(1))]
