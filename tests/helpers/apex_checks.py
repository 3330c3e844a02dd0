"""The contract of `amp-apex`, on apex's own code. `tests/backends/test_apex.py` runs it, in a process with the shim."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.apex_plugin import OPTIONS, refuse_second_initialize
from tests.helpers.apex_shim import forget
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from trainstack.backends import apex as layer

LEVEL = OPTIONS["opt_level"]
SCALED = LEVEL in ("O1", "O2")
only_scaled = pytest.mark.skipif(not SCALED, reason="this opt level scales no loss")


def scaler_of(trainer: ts.Trainer) -> dict[str, Any]:
    return dict(trainer.trainer_backend.get_state()["amp-apex"]["scalers"]["loss_scaler0"])


def run(module: ts.ModuleInterface, directory: Any, **changes: Any) -> ts.Trainer:
    return train(module, directory, backend="sp-amp-apex", **changes)


def test_apex_takes_the_arguments_of_the_layer() -> None:
    from apex import amp

    taken = set(inspect.signature(amp.initialize).parameters)
    assert taken == {*layer.OPTIONS, *layer._NOT_OPTIONS, "opt_level"}
    assert list(inspect.signature(amp.scale_loss).parameters)[:2] == ["loss", "optimizers"]
    assert "delay_unscale" in inspect.signature(amp.scale_loss).parameters
    assert list(inspect.signature(amp.load_state_dict).parameters) == ["state_dict"]


def test_the_dtypes_are_those_of_the_opt_level(tmp_path: Path) -> None:
    module = Notes(numbers(16))
    trainer = run(module, tmp_path)
    kept = trainer.trainer_backend.get_state()["amp-apex"]

    half = LEVEL in ("O2", "O3")
    assert {p.dtype for p in module.parameters()} == {torch.float16 if half else torch.float32}
    assert {m.dtype for m in kept["masters"].values()} == ({torch.float32} if LEVEL == "O2" else set())
    assert module.dtypes == {torch.float32 if LEVEL == "O0" else torch.float16}
    assert {v.dtype for v in module.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["norm", "value", "none"])
def test_it_trains_as_apex_by_hand(kind: str, tmp_path: Path) -> None:
    """Two micro-batches a step, AdamW (whose epsilon is 0 in O3's float16), a schedule, clipping: the same bits."""
    clipping: dict[str, Any] = {"clip_grads": kind == "norm", "max_grad_norm": 0.05 if kind == "norm" else 1.0}
    clipping["clip_grad_value"] = 0.01 if kind == "value" else None
    optimizer = torch.optim.SGD if LEVEL == "O3" else torch.optim.AdamW
    made: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "scheduler": True}
    module, reference = InOrder(numbers(48), **made), InOrder(numbers(48), **made)
    trainer = run(module, tmp_path, epochs=2, gpu_batch_size_limit=4, **clipping)

    forget()
    by_hand(reference, kind, trainer.estimated_global_steps_per_epoch)
    assert torch.equal(weights(module), weights(reference))
    assert not torch.equal(weights(module), weights(InOrder(numbers(48), **made)))
    assert trainer.state.skipped_steps == 0


def by_hand(module: Classifier, kind: str, steps: int) -> None:
    from apex import amp

    (optimizer,), (scheduler,) = module.get_optimizers_schedulers(steps, 2)
    model, optimizer = amp.initialize(module, optimizer, **{"verbosity": 0, **OPTIONS})
    getattr(optimizer.step, "__func__", optimizer.step)._wrapped_by_lr_sched = True  # else torch warns
    inputs, labels = module.dataset.tensors
    batches = list(zip(inputs.split(4), labels.split(4), strict=True)) * 2
    for position, batch in enumerate(batches):
        last = position % 2 == 1
        loss = model(stage=ts.Stage.TRAIN, global_step=1, batch=batch, device=torch.device("cpu"))
        with amp.scale_loss(loss / 2, optimizer, delay_unscale=not last) as scaled:
            scaled.backward()
        if last:
            if kind == "norm":
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
            elif kind == "value":
                nn.utils.clip_grad_value_(amp.master_params(optimizer), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


@only_scaled
def test_an_overflow_halves_the_scale_and_skips_everything(tmp_path: Path) -> None:
    """Only one of two optimizers has a gradient that is inf; neither moves, nor does the schedule."""
    module, norms = Overflows(), []
    stack = ts.build_trainer_backend("sp-amp-apex")
    clip = stack.clip
    stack.clip = lambda work: norms.append(clip(work)) or norms[-1]  # type: ignore[func-returns-value,method-assign]
    trainer = ts.Trainer(module, arguments(tmp_path), trainer_backend=stack)
    trainer.train()

    assert [bool(norm.isfinite()) for norm in norms] == [True, False, True, True]
    scale = min(2.0**16, OPTIONS.get("max_loss_scale", 2.0**16))
    assert scaler_of(trainer) == {"loss_scale": scale / 2, "unskipped": 2}
    assert torch.equal(module.after[1], module.after[2])
    assert not torch.equal(module.after[2][:20], module.after[3][:20])
    assert not torch.equal(module.after[2][-20:], module.after[3][-20:])
    assert [module.rates[step] for step in (1, 2)] == [module.rates[1]] * 2
    assert module.rates[3] < module.rates[2]
    assert trainer.state.skipped_steps == 1
    assert trainer.history.get_latest_metric("train/skipped_steps") == 1


@only_scaled
def test_the_default_scale_is_that_of_apex(tmp_path: Path) -> None:
    """O2 computes the loss in float16 here; a gradient of 65536 overflows, so the first step is skipped."""
    trainer = run(Classifier(numbers(16)), tmp_path, backend_options={"amp_apex": {"max_loss_scale": 2.0**24}})

    assert trainer.state.skipped_steps == (1 if LEVEL == "O2" else 0)
    assert scaler_of(trainer)["loss_scale"] == (2.0**15 if LEVEL == "O2" else 2.0**16)


def test_a_skipped_step_keeps_no_gradient(tmp_path: Path) -> None:
    """The loss of the second step is inf and its gradient is finite, so apex does not skip the step."""
    left_out, empty = LossIsInf(numbers(32)), SecondIsEmpty(numbers(32))
    one = run(left_out, tmp_path, nonfinite="skip")
    other = run(empty, tmp_path)

    assert torch.equal(weights(left_out), weights(empty))
    assert one.state.skipped_steps == other.state.skipped_steps == 1


def test_an_empty_last_micro_batch_leaves_no_scaled_gradients(tmp_path: Path) -> None:
    made: dict[str, Any] = {"gpu_batch_size_limit": 4, "clip_grads": False}
    module, reference = EverySecondIsEmpty(numbers(32)), EverySecondIsEmpty(numbers(32))
    run(module, tmp_path, **made)
    forget()
    train(reference, tmp_path, backend="sp", **made)

    assert (weights(module) - weights(reference)).abs().max() < 2e-3


def test_a_weight_may_be_used_twice(tmp_path: Path) -> None:
    """apex's cache of casts fails at this under torch 1.10 and later."""
    module = Twice(numbers(16))
    run(module, tmp_path, gpu_batch_size_limit=4)

    assert not torch.equal(weights(module), weights(Twice(numbers(16))))


def test_validation_uses_the_weights_as_they_are(tmp_path: Path) -> None:
    module = Classifier(numbers(16), validate=True)
    trainer = run(module, tmp_path)
    before = trainer.validate()["default"][0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()

    assert not torch.equal(before, trainer.validate()["default"][0])


def test_a_second_initialize_in_a_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Classifier(numbers(16)), tmp_path)
    monkeypatch.setattr(layer, "_check_not_initialized", refuse_second_initialize)

    with pytest.raises(ts.ConfigurationError, match=r"amp\.initialize was called in this process before"):
        run(Classifier(numbers(16)), tmp_path)


def test_a_checkpoint_of_another_opt_level_is_refused(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(keep_last=None)
    run(Classifier(numbers(16)), tmp_path, checkpointer_args=saving)
    other = {"amp_apex": {"opt_level": "O0" if LEVEL != "O0" else "O1"}}

    with pytest.raises(ts.CheckpointMismatchError, match=f"written under apex opt_level='{LEVEL}'"):
        run(Classifier(numbers(16)), tmp_path, checkpointer_args=saving, resume=True, backend_options=other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.net[0].compile(), r"'net\.0' is compiled"),
        (lambda m: m.net[0].half(), r"parameter 'net\.0\.weight' is torch\.float16\. Pass a float32 module"),
    ],
)
def test_unsupported_settings_are_refused_before_apex_is_called(spoil: Any, message: str, tmp_path: Path) -> None:
    module = Classifier(numbers(16))
    spoil(module)

    with pytest.raises(ts.ConfigurationError, match=message):
        run(module, tmp_path)


class Notes(Classifier):
    """Notes the dtype of the outputs of its network."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dtypes: set[torch.dtype] = set()
        self.net.register_forward_hook(lambda _, __, output: self.dtypes.add(output.dtype))


class InOrder(Classifier):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return torch.utils.data.DataLoader(self.dataset, batch_size=batch_size)


class Overflows(Classifier):
    def __init__(self) -> None:
        super().__init__(numbers(32))
        self.after: dict[int, torch.Tensor] = {}
        self.rates: dict[int, float] = {}

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        optimizers = [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]
        self.first = optimizers[0]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        if global_step == 2:
            self.net[0].weight.grad[0, 0] = float("inf")

    def on_end_train_step(self, global_step: int) -> None:
        self.after[global_step] = weights(self)
        self.rates[global_step] = self.first.param_groups[0]["lr"]


class LossIsInf(InOrder):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) + (float("inf") if global_step == 2 else 0.0)


class SecondIsEmpty(InOrder):
    seen = 0

    def batch_weight(self, batch: Any) -> float:
        self.seen += 1
        return 0.0 if self.seen == 2 else 1.0


class EverySecondIsEmpty(InOrder):
    seen = 0

    def batch_weight(self, batch: Any) -> float:
        self.seen += 1
        return self.seen % 2


class Twice(Classifier):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) + super().train_step(global_step, batch, device)
