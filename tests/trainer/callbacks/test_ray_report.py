"""`RayReport` with a stand-in for Ray; `python -m tools.launchers ray` runs the real one."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.ones(16, 1))


class Ray:
    """The part of Ray that `RayReport` uses, outside of a trial of Tune.

    Attributes:
        reports: the metrics of each report, with the path of its checkpoint.
        newest: the result of `get_checkpoint`.
    """

    def __init__(self) -> None:
        self.reports: list[tuple[dict[str, Any], str | None]] = []
        self.weights: list[dict[str, torch.Tensor] | None] = []
        self.newest: Any = None

    def report(self, metrics: dict[str, Any], checkpoint: str | None = None) -> None:
        """Read the folder before the return, as Ray does."""
        self.reports.append((metrics, checkpoint))
        self.weights.append(None if checkpoint is None else ts.read_model(checkpoint))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    place = types.SimpleNamespace(get_world_rank=lambda: 0, get_trial_id=lambda: None)
    part = types.SimpleNamespace(
        get_context=lambda: place,
        report=made.report,
        get_checkpoint=lambda: made.newest,
        Checkpoint=types.SimpleNamespace(from_directory=lambda path: path),
    )
    module = types.ModuleType("ray")
    module.train = module.tune = part  # type: ignore[attr-defined]
    for name, content in {"ray": module, "ray.train": part, "ray.tune": part}.items():
        monkeypatch.setitem(sys.modules, name, content)
    return made


def make(folder: Path, callbacks: Any, **options: Any) -> ts.Trainer:
    torch.manual_seed(0)
    module = ts.SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), "sgd", DATA, DATA, optimizer_kwargs={"lr": 0.01})
    given: Any = {"epochs": 4, "train_batch_size": 4, "writers": [], "progress": "none", "log_level": "ERROR"}
    return ts.Trainer(module, ts.TrainerArguments(output_dir=folder, **given | options), callbacks=callbacks)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_metrics_and_weights_are_reported(checkpoint: bool, ray: Ray, tmp_path: Path) -> None:
    trainer = make(tmp_path, [ts.callbacks.RayReport(checkpoint=checkpoint), ts.callbacks.EMA()], validate_every=-2)
    trainer.train()
    assert [metrics["epoch"] for metrics, _ in ray.reports] == [0, 1, 2, 3]
    assert ray.reports[-1][0]["val/loss"] == trainer.history.get_latest_metric("val/loss")
    last = ray.weights[-1]
    assert (last is not None) is checkpoint
    if last is not None:  # those that were evaluated
        assert all(map(torch.equal, last.values(), trainer.module.parameters()))


@pytest.mark.parametrize("async_save", [False, True])
def test_each_checkpoint_is_reported_with_metrics_of_its_step(async_save: bool, ray: Ray, tmp_path: Path) -> None:
    """Once, metrics of step 96 were reported with checkpoint 90, or the last epoch was not reported."""
    saving = ts.DefaultCheckpointerArguments(every_n_steps=3, async_save=async_save)
    trainer = make(tmp_path, [ts.callbacks.RayReport(checkpoint="run")], checkpointer_args=saving)
    trainer.train()
    steps = [metrics["global_step"] for metrics, _ in ray.reports]
    assert [Path(str(path)).name for _, path in ray.reports] == [f"checkpoint-{step:09d}" for step in steps]
    assert steps == sorted(set(steps))
    assert steps[-1] == 16
    assert async_save or steps == [3, 4, 6, 8, 9, 12, 15, 16]
    losses = dict(zip((4, 8, 12, 16), trainer.history.get_metric_values("val/loss"), strict=True))
    for metrics, _ in ray.reports:
        step = metrics["global_step"]
        assert metrics["epoch"] == (step - 1) // 4
        assert metrics.get("val/loss") == losses.get(step)


def test_a_failed_training_reports_no_further_checkpoint(ray: Ray, tmp_path: Path) -> None:
    trainer = make(tmp_path, [ts.callbacks.RayReport(checkpoint="run")])

    def fail(trainer: Any, epoch: int) -> None:
        if epoch == 2:
            raise RuntimeError(f"in epoch {epoch}")

    trainer.on(ts.Event.TRAIN_EPOCH_BEGIN)(fail)
    with pytest.raises(RuntimeError, match="in epoch 2"):
        trainer.train()
    assert [metrics["global_step"] for metrics, _ in ray.reports] == [4]


def test_a_start_elsewhere_resumes_from_a_checkpoint_of_ray(ray: Ray, tmp_path: Path) -> None:
    assert ts.callbacks.RayReport.resume() == "auto"
    whole = make(tmp_path / "whole", [])
    whole.train()
    first = make(tmp_path / "first", [ts.callbacks.RayReport(checkpoint="run")], max_steps=6)
    first.train()
    kept = tmp_path / "storage" / "checkpoint_000001"
    kept.parent.mkdir()
    Path(str(ray.reports[-1][1])).rename(kept)
    ray.newest = types.SimpleNamespace(path=str(kept), filesystem=types.SimpleNamespace(type_name="local"))
    assert ts.callbacks.RayReport.resume() == str(kept)
    second = make(tmp_path / "second", [], resume=ts.callbacks.RayReport.resume())
    second.train()
    assert all(map(torch.equal, second.module.parameters(), whole.module.parameters()))


def test_all_workers_download_a_checkpoint_to_one_folder(ray: Ray) -> None:
    bucket = types.SimpleNamespace(type_name="s3")

    def resume(path: str) -> Path:
        ray.newest = types.SimpleNamespace(path=path, filesystem=bucket, to_directory=str)
        return Path(ts.callbacks.RayReport.resume())

    assert resume("bucket/run/checkpoint_7") == resume("bucket/run/checkpoint_7")
    assert resume("bucket/run/checkpoint_7").name == "checkpoint_7"
    assert resume("bucket/run/checkpoint_7") != resume("bucket/other/checkpoint_7")


def test_another_kind_of_checkpoint_is_refused(ray: Ray) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"checkpoint='all'.*True, False or 'run'"):
        ts.callbacks.RayReport(checkpoint="all")  # type: ignore[arg-type]
