"""Telemetry: metrics of records as coordinates of the clipped sum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, numbers
from tests.helpers.private_runs import Rated, private, promise
from tests.helpers.processes import run_world
from tests.helpers.workers.telemetry import telemetry_of
from trainstack.auditing.canaries import AuditedRun
from trainstack.backends.dp.arguments import plan_privacy
from trainstack.backends.dp.clipping import AdaptiveClipper, AutomaticClipper, Clipper, FlatClipper, per_layer_clipper
from trainstack.backends.dp.modes.bookkeeping import BookkeepingMode
from trainstack.backends.dp.modes.loop import LoopMode
from trainstack.backends.dp.modes.vmap import VmapMode
from trainstack.backends.dp.telemetry import Telemetry
from trainstack.cli.privacy_ledger import current_statement

pytestmark = pytest.mark.usefixtures("unprobed")

ASKED = {"loss": (0, 4), "accuracy": (0, 1), "grad_norm": (0.5, 1.0)}
MODES = [mode for mode in (BookkeepingMode, VmapMode, LoopMode) if mode.one_by_one]
CLIPPERS: dict[str, Any] = {
    "flat": lambda names: FlatClipper(0.5),
    "per_layer": lambda names: per_layer_clipper(names, 0.5),
    "automatic": lambda names: AutomaticClipper(0.5),
    "adaptive": lambda names: AdaptiveClipper(0.5),
}


def train_step(model: nn.Module, batch: Any) -> Any:
    return model(stage=ts.Stage.TRAIN, global_step=1, batch=batch, device=torch.device("cpu"))


class Steep(Rated):
    """Its losses exceed any range for large inputs, and are negative for some labels."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        found = super().train_step(global_step, batch, device)
        sign = torch.where(batch[1].float().mean() > 1, -1.0, 1.0)
        return {**found, "loss": sign * found["loss"] * batch[0].abs().mean()}


def joint_sum(data: TensorDataset, mode_type: Any, clipping: str, count_noise: float) -> tuple[Tensor, float]:
    """The sum of all coordinates over `data` without noise, in the units of the gradient; and the sensitivity."""
    module = Steep()
    names = [name for name, _ in module.named_parameters()]
    clipper: Clipper = CLIPPERS[clipping](names)
    noise = {"count_noise_multiplier": count_noise} if clipping == "adaptive" else {}
    args = promise(telemetry=ASKED, telemetry_weight=0.3, clipping=clipping, noise_multiplier=1.0, **noise)
    plan = plan_privacy(args, expected_batch_size=8, dataset_size=50, steps=1)
    mode = mode_type(module, list(module.parameters()), clipper)
    telemetry = Telemetry(args, plan, clipper, one_by_one=mode.one_by_one)
    mode.observer = telemetry.observe
    for start in range(0, len(data), 5):  # micro-batches
        batch = [column[start : start + 5] for column in data.tensors]
        mode.add(train_step, batch, len(batch[0]))
        telemetry.check_observed(len(batch[0]))
    sums = telemetry.pop_sums(torch.device("cpu"))
    # All coordinates have noise of sigma times the sensitivity, so the noise of a coordinate gives its unit.
    joint = clipper.sensitivity * telemetry.stretch
    scaled = sums * joint / torch.tensor(telemetry.deviations)
    return torch.cat([*(part.flatten() for part in mode.pop_sums()), scaled]), joint


@pytest.mark.parametrize("clipping", list(CLIPPERS))
@pytest.mark.parametrize("mode", MODES)
def test_a_record_moves_all_coordinates_together_by_the_stated_sensitivity(mode: Any, clipping: str) -> None:
    inputs, labels = numbers(11).tensors
    extreme = [1.0, 1e-3, 1e6, 1e30, math.inf, math.nan]
    for scale in extreme:
        rows = inputs.clone()
        rows[0] *= scale
        for label in (0, 2):
            classes = torch.cat([torch.tensor([label]), labels[1:]])
            whole, joint = joint_sum(TensorDataset(rows, classes), mode, clipping, 2.0)
            without, _ = joint_sum(TensorDataset(rows[1:], labels[1:]), mode, clipping, 2.0)
            moved = float((whole - without).norm())
            assert math.isfinite(moved)
            assert moved <= joint * (1 + 1e-3), (scale, label)
    assert moved > 0.25 * joint  # a record without a finite gradient still has an accuracy and a norm


def test_the_adaptive_count_keeps_its_noise_next_to_telemetry() -> None:
    args = promise(clipping="adaptive", noise_multiplier=1.5, count_noise_multiplier=2.0)
    plan = plan_privacy(args, expected_batch_size=8, dataset_size=50, steps=1)
    alone = Telemetry(args, plan, AdaptiveClipper(0.5), one_by_one=True)
    assert alone.deviations == pytest.approx([2 * 2.0])  # of 2 (count - records / 2)
    assert alone.stretch * 1.5 == pytest.approx((1.5**-2 - (2 * 2.0) ** -2) ** -0.5)  # Andrew et al., theorem 1

    both = promise(clipping="adaptive", noise_multiplier=1.5, count_noise_multiplier=2.0, telemetry={"loss": (0, 4)})
    shared = Telemetry(both, plan, AdaptiveClipper(0.5), one_by_one=True)
    assert shared.stretch**2 == pytest.approx(alone.stretch**2 + 0.1**2)
    assert shared.deviations == pytest.approx([4.0 * shared.stretch / alone.stretch, 1.5 * shared.stretch / 0.1])
    audited = AuditedRun(args=both)
    assert audited.gradient_noise(1.5) == pytest.approx(1.5 * shared.stretch)  # the audit compares noise with it


class Fixed(ts.ModuleInterface):
    """Losses and norms that do not depend on the weights."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        losses = torch.arange(records) % 4 / 2 + 0.5  # 0.5, 1, 1.5, 2
        self.data = TensorDataset(losses, (torch.arange(records) % 4 == 0).float())

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        return torch.optim.SGD([self.weight], lr=1.0)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size, sampler=sampler(self.data))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        losses, right = batch
        loss = (losses + (self.weight[0] - self.weight[0].detach()) * losses).mean()  # the norm is the loss
        return {"loss": loss, "right": right}


def fixed_run(directory: Path, **promised: Any) -> tuple[ts.Trainer, list[Tensor]]:
    args = promise(
        telemetry={"loss": (0, 4), "right": (0, 1), "grad_norm": (0.7, 1.2, 3.0)}, grad_mode="vmap", **promised
    )
    module, seen = Fixed(400), list[Tensor]()
    options = {"train_batch_size": 100, "epochs": 100, "log_every": 1}

    class Watch(ts.Callback):
        def on_train_step_end(self, trainer: Any, step: int) -> None:
            seen.append(module.weight.detach().clone())

    trainer = ts.Trainer(module, private(directory, args, **options), callbacks=[Watch()])
    trainer.train()
    return trainer, seen


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[ts.Trainer, list[Tensor]]:
    return fixed_run(tmp_path_factory.mktemp("noisy"), noise_multiplier=8.0)


NAMES = ["loss", "right", "grad_norm_below_0.7", "grad_norm_below_1.2", "grad_norm_below_3"]
TRUE = [1.25, 0.25, 0.25, 0.5, 1.0]
HALF = [2.0, 0.5, 0.5, 0.5, 0.5]


def test_telemetry_noise_is_independent_and_that_of_the_mechanism(noisy: Any) -> None:
    trainer, seen = noisy
    steps, stretch = len(seen), math.sqrt(1 + 5 * 0.1**2)
    noise = 8.0 * stretch / (0.1 * 100)
    values = torch.tensor([trainer.history.get_metric_values(f"train/{name}") for name in NAMES]).T
    unit = (values - torch.tensor(TRUE)) / torch.tensor(HALF)
    assert unit.std(0).tolist() == pytest.approx([noise] * 5, rel=0.12)  # 3 standard errors at 400 steps
    moves = torch.diff(torch.stack(seen), dim=0)  # lr 1
    assert moves[:, 1:].std().item() == pytest.approx(8.0 * stretch * 0.5 / 100, rel=0.03)
    table = torch.corrcoef(torch.cat([unit[1:], moves[:, 1:]], dim=1).T)
    off = table - torch.eye(len(table))
    assert off.abs().max() < 5 / math.sqrt(steps)
    after = torch.corrcoef(torch.cat([unit[1:], unit[:-1]], dim=1).T)[:5, 5:]
    assert after.abs().max() < 5 / math.sqrt(steps)


def test_means_over_many_steps_are_within_their_standard_error(noisy: Any) -> None:
    trainer, _ = noisy
    for name, true, half in zip(NAMES, TRUE, HALF, strict=True):
        values = torch.tensor(trainer.history.get_metric_values(f"train/{name}"))
        noise = 8.0 * math.sqrt(1.05) / (0.1 * 100)
        error = half * math.sqrt((noise**2 + (1 - 0.25) / 100) / len(values))
        assert abs(float(values.mean()) - true) < 4 * error, name
        epochs = torch.tensor(trainer.history.get_metric_values(f"train/{name}_epoch"))
        assert epochs.mean().item() == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-5)


def test_without_noise_the_values_are_exact(tmp_path: Path) -> None:
    args = promise(telemetry={"loss": (0, 4), "right": (0, 1), "grad_norm": (0.7, 1.2, 3.0)}, grad_mode="vmap")
    trainer = ts.Trainer(Fixed(400), private(tmp_path, args, train_batch_size=400))  # all records in each step
    trainer.train()
    last = trainer.history.values_at(trainer.state.global_step)
    assert [last[f"train/{name}_epoch"] for name in NAMES] == pytest.approx(TRUE, abs=1e-6)
    assert last["train/grad_norm_p50_epoch"] == pytest.approx(1.2)


class Counting(Fixed):
    """Its attribute changes: the run then compares gradients on two records of a batch."""

    calls = 0

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        self.calls += 1


def test_telemetry_counts_no_record_of_a_comparison_of_gradients(tmp_path: Path) -> None:
    args = promise(telemetry={"loss": (0, 4)}, grad_mode="vmap")
    trainer = ts.Trainer(Counting(400), private(tmp_path, args, train_batch_size=400, epochs=3))
    trainer.train()
    losses = trainer.history.get_metric_values("train/loss_epoch")
    assert losses == pytest.approx([TRUE[0]] * 3, abs=1e-6)


def test_the_plan_states_cost_and_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = promise(telemetry=ASKED, noise_multiplier=1.0, grad_mode="vmap")
    options = {"train_batch_size": 256, "writers": ["stdout"], "report": False, "max_steps": 1}
    ts.Trainer(Rated(numbers(2560)), private(tmp_path, args, **options)).train()
    out = " ".join(capsys.readouterr().out.split())
    assert "telemetry loss in (0, 4): +- 0.08 a step by noise, at most +- 0.12 by sampling" in out
    assert "shares of gradient norms up to 0.5, 1: +- 0.02 a step by noise" in out
    assert "raises the noise of the gradient by 2 %" in out
    assert "noisy telemetry: loss, accuracy, grad_norm" in out


class StopsAt(ts.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Any, step: int) -> None:
        if step == self.step:
            trainer.request_stop("test")


def test_an_early_stop_keeps_the_epsilon_of_planned_steps(tmp_path: Path) -> None:
    args = promise(noise_multiplier=1.0)
    saving = {"checkpointer_args": ts.DefaultCheckpointerArguments(), "resume": "auto"}

    def run(**changes: Any) -> Any:
        trainer = ts.Trainer(Rated(), private(tmp_path, args, epochs=2, **saving, **changes), callbacks=[StopsAt(7)])
        trainer.train()
        assert trainer.state.global_step == changes.get("max_steps", 7)
        return trainer.privacy_statement()

    stopped = run()
    assert stopped.steps == 12
    assert "5 planned steps count although they were not taken" in stopped.text
    assert current_statement(tmp_path).epsilon == stopped.epsilon
    whole = run(max_steps=12)
    assert (whole.steps, whole.epsilon) == (12, stopped.epsilon)
    assert "not taken" not in whole.text


def test_a_resumed_run_continues_the_running_means(tmp_path: Path) -> None:
    args = promise(telemetry={"loss": (0, 4), "accuracy": (0, 1)}, grad_mode="vmap", noise_multiplier=1.0, debug_seed=3)

    def run(name: str, *callbacks: ts.Callback) -> dict[str, Any]:
        options = {"epochs": 2, "log_every": 4, "checkpointer_args": ts.DefaultCheckpointerArguments()}
        made = private(tmp_path / name, args, resume="auto", **options)
        trainer = ts.Trainer(Rated(), made, callbacks=callbacks)
        trainer.train()
        return trainer.history.to_dict()

    run("stopped", StopsAt(3))
    run("stopped", StopsAt(7))
    assert run("stopped") == run("whole")


@pytest.mark.processes
def test_two_processes_release_the_same_as_one(tmp_path: Path) -> None:
    one = telemetry_of(str(tmp_path / "one"), backend="sp-dp", noise_multiplier=1.0, debug_seed=3)
    first, second = run_world(2, telemetry_of, directory=str(tmp_path / "two"), noise_multiplier=1.0, debug_seed=3)
    assert first == second
    for name, values in one["values"].items():
        assert first["values"][name]["value"] == pytest.approx(values["value"], rel=1e-4, abs=1e-5), name


class Coupled(Classifier):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        return {"loss": loss, "scores": self.net(batch[0])}


def test_a_missing_telemetry_output_is_refused_before_training(tmp_path: Path) -> None:
    for asked, message in (
        ("accuracy", r"returns a dict with the keys \['loss', 'scores'\]"),
        ("scores", r"shape \(3,\) for each record"),
    ):
        args = promise(telemetry={asked: (0, 1)}, grad_mode="vmap")
        with pytest.raises(ts.PrivacyError, match=message):
            ts.Trainer(Coupled(), private(tmp_path, args)).train()
    with pytest.raises(ts.PrivacyError, match="train_step sees the whole batch"):
        ts.Trainer(Rated(), private(tmp_path, promise(telemetry=ASKED, grad_mode="hooks"))).train()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"telemetry": ["loss"]}, "write a dict of ranges"),
        ({"telemetry": {"loss": 10}}, "the lowest and the highest"),
        ({"telemetry": {"loss": (10, 0)}}, "the lowest and the highest"),
        ({"telemetry": {"loss": (0, math.inf)}}, "the lowest and the highest"),
        ({"telemetry": {"grad_norm": (0.0, 1.0)}}, "rising thresholds above 0"),
        ({"telemetry": {"grad_norm": ()}}, "rising thresholds above 0"),
        ({"telemetry": {"": (0, 1)}}, "a key of the outputs of train_step"),
        ({"telemetry_weight": 0.0}, "telemetry_weight=0.0"),
        ({"telemetry": {"loss": (0, 1)}, "log_train_loss": True}, "both would be 'train/loss'"),
        ({"public_validation": 1}, "public_validation=1: write True or False"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=message):
        promise(**given)
