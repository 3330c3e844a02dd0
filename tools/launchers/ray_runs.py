"""Ray Train with a killed worker, and Ray Tune with trials that are stopped early; both report to Ray."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer

import trainstack as ts
from tools.launchers.training import Network, digest, samples_of_steps

EPOCHS = 4


def arguments(folder: Path | str, **options: Any) -> ts.TrainerArguments:
    """The arguments of `tools.launchers.training` without output."""
    return ts.TrainerArguments(
        device="cpu",
        epochs=EPOCHS,
        train_batch_size=8,
        val_batch_size=8,
        output_dir=folder,
        progress="none",
        log_level="ERROR",
        **options,
    )


TRAININGS: dict[str, dict[str, Any]] = {
    "train": {},
    "train, killed": {"killed_at": 30},
    "train, killed, async_save": {"killed_at": 30, "async_save": True},
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The end of a run of Ray Train.

    Attributes:
        digest: the digest of the weights.
        step: the step of the checkpoint in Ray.
        val_loss: the val/loss in Ray; nan if it is that of another step.
        first_steps: the first step of each start of each worker.
    """

    digest: str
    step: int
    val_loss: float
    first_steps: tuple[int, ...]

    def __str__(self) -> str:
        starts = ", ".join(map(str, self.first_steps))
        known = f"Ray has val/loss {self.val_loss:.4f} with the checkpoint of step {self.step}"
        return f"{self.digest}; {known}; its workers began with steps {starts}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The end of a trial of Ray Tune.

    Attributes:
        lr: the learning rate.
        reports: the number of reports.
        val_loss: the last reported val/loss.
    """

    lr: float
    reports: int
    val_loss: float

    def __str__(self) -> str:
        return f"lr {self.lr:g}: {self.reports} reports, val/loss {self.val_loss:.4f}"


def train(config: dict[str, Any]) -> None:
    """A worker of Ray Train. Each start has a new folder, as on a machine without shared storage."""
    ts.seed_everything(0)
    folder = Path(tempfile.mkdtemp(prefix=f"start-{time.time():.0f}-", dir=config["folder"]))
    report = ts.callbacks.RayReport(checkpoint="run")
    saving = ts.DefaultCheckpointerArguments(every_n_steps=12, async_save=config["async_save"])
    args = arguments(folder, backend="ddp", resume=ts.callbacks.RayReport.resume(), checkpointer_args=saving)
    trainer = ts.Trainer(Network(folder), args, callbacks=[report])
    mark = Path(config["folder"]) / "killed"

    def kill(trainer: Any, step: int) -> None:
        if step == config["killed_at"] and get_context().get_world_rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.on(ts.Event.TRAIN_STEP_END)(kill)
    trainer.train()
    if trainer.is_main_process:
        (Path(config["folder"]) / "digest").write_text(digest(trainer.module))
    trainer.close()


def run_train(folder: Path, *, killed_at: int = -1, async_save: bool = False) -> Training:
    """Train on two workers, and kill one after the step `killed_at`."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "killed_at": killed_at, "async_save": async_save},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    saved = ts.verify_checkpoint(result.checkpoint.path)
    return Training(
        digest=(folder / "digest").read_text(),
        step=saved.global_step,
        val_loss=result.metrics["val/loss"] if result.metrics["global_step"] == saved.global_step else math.nan,
        first_steps=tuple(
            min(samples_of_steps(run)) for run in sorted(folder.glob("start-*")) if samples_of_steps(run)
        ),
    )


def trial(config: dict[str, Any]) -> None:
    """A trial of Ray Tune."""
    ts.seed_everything(0)
    folder = Path(tune.get_context().get_trial_dir()) / "run"
    folder.mkdir(exist_ok=True)
    module = Network(folder, lr=config["lr"])
    ts.Trainer(module, arguments(folder, backend="sp"), callbacks=[ts.callbacks.RayReport()]).train()


def run_tune(folder: Path) -> list[Trial]:
    """Run four trials in sequence; ASHA stops those that are worse after an epoch."""
    stopping = tune.schedulers.ASHAScheduler(grace_period=1, max_t=EPOCHS, reduction_factor=2)
    goal = tune.TuneConfig(metric="val/loss", mode="min", scheduler=stopping, max_concurrent_trials=1)
    space = {"lr": tune.grid_search([0.02, 0.01, 1e-4, 1e-6])}
    storage = tune.RunConfig(storage_path=str(folder / "ray"), name="search")
    results = tune.Tuner(trial, param_space=space, tune_config=goal, run_config=storage).fit()
    return [
        Trial(lr=each.config["lr"], reports=each.metrics["training_iteration"], val_loss=each.metrics["val/loss"])
        for each in results
    ]


def start() -> None:
    """Start Ray on this machine, with room for two processes."""
    os.environ.update(RAY_TRAIN_V2_ENABLED="1", RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)


def stop() -> None:
    """Stop Ray."""
    ray.shutdown()
