"""Mistakes of module authors that would train another model than intended, without an error."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from tests.trainer.evaluation.test_metrics import Counts
from trainstack.trainer.run.step_checks import FIRST_STEPS

Logs = pytest.LogCaptureFixture


def said(caplog: Logs, *words: str) -> list[str]:
    return [record.message for record in caplog.records if all(word in record.message for word in words)]


# --- the inputs of a metric


class Scored(Classifier):
    """Validates with a metric; `form` makes the outputs of `val_step` from loss, predictions and labels."""

    def __init__(self, form: Callable[..., Any], dataset: Any = None, **named: Any) -> None:
        super().__init__(numbers(16) if dataset is None else dataset, validate=True, **named)
        self.form = form
        self.metrics = {"acc": Counts()}

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        scores = self.net(batch[0])
        return self.form(cross_entropy(scores, batch[1].long()), scores.argmax(1), batch[1])


@pytest.mark.parametrize(
    "form",
    [lambda loss, found, labels: (loss, found == labels), lambda loss, found, labels: found == labels],
    ids=["loss and booleans", "booleans"],
)
def test_booleans_are_refused_as_predictions(form: Any, tmp_path: Path) -> None:
    message = (
        "val_step returned a boolean tensor, and the metric 'acc' would compare it with the labels. Return the pred"
    )
    with pytest.raises(ts.ModuleContractError, match=message):
        train(Scored(form), tmp_path)


def test_booleans_are_predictions_for_boolean_labels(tmp_path: Path) -> None:
    class Binary(Scored):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1].long())

    inputs, labels = numbers(16).tensors
    data = TensorDataset(inputs, labels == 1)
    trainer = train(Binary(lambda loss, found, labels: (loss, found == 1), data), tmp_path)
    assert "val/acc" in trainer.history.get_metric_names()


@pytest.mark.parametrize(
    "form",
    [
        lambda loss, found, labels: (loss, found == 1, labels),
        lambda loss, found, labels: {"loss": loss, "preds": found == 1},
        lambda loss, found, labels: (loss, found),
    ],
    ids=["both chosen", "named", "predictions"],
)
def test_outputs_that_the_step_chose_are_accepted(form: Any, tmp_path: Path) -> None:
    assert "val/acc" in train(Scored(form), tmp_path).history.get_metric_names()


# --- layers that PyTorch does not register

Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: [nn.Linear(4, 4), nn.Linear(4, 4)],
            "Classifier.parts is a list with 2 modules, .* Use nn.ModuleList.",
        ),
        (lambda: (nn.Linear(4, 4),), "Classifier.parts is a tuple with 1 module, .* Use nn.ModuleList."),
        (lambda: {"a": nn.Linear(4, 3)}, "Classifier.parts is a dict with 1 module, .* Use nn.ModuleDict."),
        (lambda: [[nn.Linear(4, 4)], [nn.Linear(4, 4)]], "Classifier.parts is a list with 2 modules"),
        (lambda: {"a": [{"b": (nn.Linear(4, 3),)}]}, "Classifier.parts is a dict with 1 module"),
        (lambda: [nn.Parameter(torch.zeros(2))], "list with 1 parameter, .* Use nn.ParameterList."),
        (lambda: Pair(nn.Linear(2, 2), nn.Parameter(torch.zeros(2))), "tuple with 1 module and 1 parameter"),
    ],
)
def test_unregistered_layers_in_containers_are_logged(make: Any, message: str, tmp_path: Path, caplog: Logs) -> None:
    module = Classifier(numbers(16))
    module.parts = make()
    train(module, tmp_path)
    (told,) = said(caplog, "does not register")
    assert re.search(message, told)


def test_unregistered_layers_of_a_submodule_are_logged(tmp_path: Path, caplog: Logs) -> None:
    class Net(nn.Sequential):
        def __init__(self, *parts: nn.Module) -> None:
            super().__init__(*parts)
            self._more = [nn.Linear(2, 2)]

    module = Classifier(numbers(16))
    module.net = Net(*module.net)
    train(module, tmp_path)
    assert said(caplog, "Net._more is a list with 1 module")


def test_lists_without_trainable_layers_are_not_logged(tmp_path: Path, caplog: Logs) -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

    module = Classifier(numbers(16))
    module.layers = [module.net[0], module.net[3]]  # registered as parts of `net`
    module.tied = [module.net[0].weight]
    module.losses = {"ce": nn.CrossEntropyLoss(), "metric": Metric(), "act": nn.ReLU()}
    module.teacher = [nn.Linear(3, 3).requires_grad_(False)]
    module.itself = [module]
    module.cycle = []
    module.cycle.append(module.cycle)
    module.samples = [(torch.zeros(1), index) for index in range(20_000)]
    module.lstm = nn.LSTM(2, 2)
    train(module, tmp_path)
    assert not said(caplog, "does not register")


# --- parameters without a gradient


class Parts(Classifier):
    """`body` and `head`; `mode` is the treatment of the body."""

    def __init__(self, mode: str, **named: Any) -> None:
        super().__init__(numbers(16), **named)
        self.body, self.head, self.mode = nn.Linear(6, 6), nn.Linear(6, 3), mode
        del self.net

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        inputs = batch[0]
        if self.mode == "no_grad":
            with torch.no_grad():
                inputs = self.body(inputs)
        elif self.mode == "detached":
            inputs = self.body(inputs).detach()
        elif self.mode == "used" or (self.mode == "later" and global_step > 1):
            inputs = self.body(inputs)
        return cross_entropy(self.head(inputs), batch[1])


@pytest.mark.parametrize("mode", ["no_grad", "detached", "unused", "later"])
@pytest.mark.parametrize("limit", [512, 4])
def test_parameters_without_a_gradient_are_logged(mode: str, limit: int, tmp_path: Path, caplog: Logs) -> None:
    train(Parts(mode), tmp_path, gpu_batch_size_limit=limit)
    (told,) = said(caplog, "received no gradient")
    assert told.startswith("2 trainable parameters received no gradient in the first step: body.weight, body.bias.")


@pytest.mark.parametrize("mode", ["used", "frozen", "frozen by the trainer"])
def test_used_and_frozen_parameters_are_not_logged(mode: str, tmp_path: Path, caplog: Logs) -> None:
    module = Parts("used" if mode == "used" else "no_grad")
    module.body.requires_grad_(mode != "frozen")
    trainer = ts.Trainer(module, arguments(tmp_path))
    if mode == "frozen by the trainer":
        trainer.on(ts.Event.TRAIN_EPOCH_BEGIN)(lambda trainer: trainer.freeze(module.body.parameters()))
    trainer.train()
    assert not said(caplog, "received no gradient")


# --- another tensor in place of the validation loss


class Validates(Classifier):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__(numbers(16), validate=True)
        self.form = form

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        scores = self.net(batch[0])
        return self.form(cross_entropy(scores, batch[1]), scores, batch[1])


@dataclass
class Out:
    scores: Tensor
    val_loss: Tensor


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda loss, scores, labels: (scores, labels), "a tuple of tensors of shapes (8, 3), (8,): no loss was found"),
        (lambda loss, scores, labels: {"val_loss": loss}, "a dict with the keys 'val_loss': no loss was found"),
        (
            lambda loss, scores, labels: {"ce": loss.item(), "right": 3.0},
            "'ce', 'right', of which 'ce', 'right' are numbers, not tensors: no loss was found",
        ),
        (lambda loss, scores, labels: scores, "a tensor of shape (8, 3): no loss was found"),
        (lambda loss, scores, labels: Out(scores, loss), "a Out with the keys 'scores', 'val_loss': no loss"),
        (lambda loss, scores, labels: (scores, loss), "a tuple of tensors of shapes (8, 3), ()"),
        (lambda loss, scores, labels: [scores, "names"], "a list of Tensor, str"),
    ],
)
def test_outputs_without_a_loss_are_described_once(form: Any, words: str, tmp_path: Path, caplog: Logs) -> None:
    trainer = train(Validates(form), tmp_path, epochs=2, val_batch_size=8)
    (told,) = said(caplog, "no loss was found")
    assert words in told
    assert "so no val/loss is recorded. Return (loss, ...) or a dict with the key 'loss'." in told
    assert "val/loss" not in trainer.history.get_metric_names()


def test_a_loss_in_a_dict_may_be_at_any_place(tmp_path: Path, caplog: Logs) -> None:
    trainer = train(Validates(lambda loss, scores, labels: {"right": scores.mean(), "loss": loss}), tmp_path)
    assert trainer.history.get_latest_metric("val/loss") > 0.5
    assert not said(caplog, "no loss")


def test_predictions_for_a_hook_or_a_metric_need_no_loss(tmp_path: Path, caplog: Logs) -> None:
    class Hooked(Validates):
        def on_end_val_epoch(self, global_step: int, scores: Tensor, labels: Tensor, key: str = "default") -> None:
            assert len(scores) == len(labels)

    train(Hooked(lambda loss, scores, labels: (scores, labels)), tmp_path)
    measured = Validates(lambda loss, scores, labels: (scores.argmax(1), labels))
    measured.metrics = {"right": Counts()}
    train(measured, tmp_path)
    train(Validates(lambda loss, scores, labels: None), tmp_path)
    assert not said(caplog, "no loss")


def test_a_misplaced_loss_is_logged_despite_a_hook(tmp_path: Path, caplog: Logs) -> None:
    class Hooked(Validates):
        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            pass

    train(Hooked(lambda loss, scores, labels: (scores, loss)), tmp_path)
    assert said(caplog, "no loss was found")


@pytest.mark.parametrize(("values", "expected"), [([2e307, 2e307], 2e307), ([float("inf"), -float("inf")], None)])
def test_the_mean_of_extreme_losses_is_recorded(values: list[float], expected: float | None, tmp_path: Path) -> None:
    given = iter(values)
    module = Validates(lambda loss, scores, labels: torch.tensor(next(given), dtype=torch.float64))
    value = train(module, tmp_path, val_batch_size=8).history.get_latest_metric("val/loss")
    assert value == pytest.approx(expected) if expected is not None else value != value


# --- manual calls of methods that the trainer calls


class ByHand(Classifier):
    """Makes the call `call` in `place`."""

    def __init__(self, call: str, place: str = "train_step", schedule: str = "linear") -> None:
        super().__init__(numbers(24))
        self.call, self.place, self.schedule = call, place, schedule

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.plan.total_steps if self.plan is not None else None
        assert total is not None
        make = torch.optim.lr_scheduler
        self.scheduler: Any = (
            make.LinearLR(self.optimizer, 1.0, 0.5, total)
            if self.schedule == "linear"
            else make.OneCycleLR(self.optimizer, 0.1, total)
        )
        return [self.optimizer], [self.scheduler]

    def act(self, loss: Any, place: str) -> None:
        if place != self.place:
            return
        if "backward" in self.call:
            loss.backward(retain_graph="retain" in self.call)
        if "zero" in self.call:
            self.zero_grad()
        if "optimizer" in self.call:
            self.optimizer.step()
        if "scheduler" in self.call:
            self.scheduler.step()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if "backward" not in self.call:
            self.act(None, "train_step")
        loss = super().train_step(global_step, batch, device)
        if "backward" in self.call:
            self.act(loss, "train_step")
        return loss

    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        self.act(loss_tensor, "on_end_backward")

    def on_end_train_step(self, global_step: int) -> None:
        self.act(None, "on_end_train_step")


by_hand = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


@by_hand
@pytest.mark.parametrize("limit", [512, 4], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("call", "place", "named"),
    [
        ("backward, retain", "train_step", "backward()"),
        ("zero", "train_step", "zero_grad()"),
        ("zero", "on_end_backward", "zero_grad()"),
        ("optimizer", "train_step", "optimizer.step()"),
        ("optimizer", "on_end_train_step", "optimizer.step()"),
        ("scheduler", "train_step", "scheduler.step()"),
        ("scheduler", "on_end_train_step", "scheduler.step()"),
    ],
)
def test_a_manual_call_is_logged_once(
    call: str, place: str, named: str, limit: int, tmp_path: Path, caplog: Logs
) -> None:
    train(ByHand(call, place), tmp_path, gpu_batch_size_limit=limit)
    told = said(caplog, "train_step or a hook called")
    if call == "zero" and limit == 512:
        assert not told  # a single micro-batch has no earlier gradients to lose
    else:
        assert len(told) == 1
        assert (
            f"called {named} itself in global step 1. The trainer calls backward(), step() and zero_grad()" in told[0]
        )


def test_a_second_backward_pass_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a second time") as raised:
        train(ByHand("backward"), tmp_path)
    assert any("the trainer calls backward() on the returned loss" in note for note in raised.value.__notes__)


def test_the_error_for_an_exhausted_schedule_mentions_manual_steps(tmp_path: Path) -> None:
    with pytest.raises(ts.ModuleContractError, match=r"other code has called its step\(\) 3 times\.") as raised:
        train(ByHand("scheduler", "on_end_train_step", schedule="one cycle"), tmp_path, epochs=2)
    assert "make it for" not in str(raised.value)


@by_hand
def test_the_error_in_a_manual_scheduler_step_mentions_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Tried to step") as raised:
        train(ByHand("scheduler", schedule="one cycle"), tmp_path, epochs=2)
    assert any("other code has called its step()" in note for note in raised.value.__notes__)


def test_a_manual_scheduler_step_at_an_epoch_end_is_logged(tmp_path: Path, caplog: Logs) -> None:
    class AtEnd(ByHand):
        def on_end_train_epoch(self, global_step: int) -> None:
            self.scheduler.step()

    train(AtEnd(""), tmp_path, epochs=3, max_train_steps_per_epoch=1)
    assert len(said(caplog, "called scheduler.step() itself in global step 2")) == 1


def test_a_micro_batch_without_weight_is_not_logged_as_zeroing(tmp_path: Path, caplog: Logs) -> None:
    class Weighs(Classifier):
        def batch_weight(self, batch: Any) -> float:
            return float(batch[1][0] > 0)

    train(Weighs(numbers(24)), tmp_path, gpu_batch_size_limit=2)
    assert not said(caplog, "called")


def test_zeroing_in_place_is_logged(tmp_path: Path, caplog: Logs) -> None:
    class Zeroes(ByHand):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.optimizer.zero_grad(set_to_none=False)
            return super().train_step(global_step, batch, device)

    train(Zeroes(""), tmp_path, gpu_batch_size_limit=4)
    assert len(said(caplog, "called backward() or zero_grad() itself")) == 1


def test_an_optimizer_that_steps_in_backward_is_not_logged(tmp_path: Path, caplog: Logs) -> None:
    class Within(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            for parameter in self.parameters():
                inner = torch.optim.SGD([parameter], lr=0.1)

                def step(parameter: Tensor, inner: Any = inner) -> None:
                    inner.step()
                    inner.zero_grad()

                parameter.register_post_accumulate_grad_hook(step)
            return torch.optim.SGD(self.parameters(), lr=0.1), None

    train(Within(numbers(24)), tmp_path)
    assert not said(caplog, "received no gradient")


class Gan(Classifier):
    """Steps its discriminator inside `train_step`, as many scripts do."""

    def __init__(self) -> None:
        super().__init__(numbers(40))
        self.net = nn.Linear(2, 6)
        self.judge = nn.Linear(6, 1)

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.judge)]
        return self.optimizers, []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        noise = torch.randn(len(batch[0]), 2)
        judging = self.judge(self.net(noise).detach()).mean() - self.judge(batch[0]).mean()
        self.optimizers[1].zero_grad()
        judging.backward()
        self.optimizers[1].step()
        return -self.judge(self.net(noise)).mean()


def test_a_gan_that_steps_its_discriminator_trains_with_one_warning(tmp_path: Path, caplog: Logs) -> None:
    module = Gan()
    before = module.judge.weight.detach().clone()
    train(module, tmp_path)
    assert not torch.equal(before, module.judge.weight)
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "called backward() and optimizer.step() itself" in told


def test_the_checks_are_removed_after_the_first_steps(tmp_path: Path) -> None:
    module = Classifier(numbers(40))
    seen: list[tuple[int, bool]] = []

    class Looks(ts.Callback):
        def on_before_optimizer_step(self, trainer: Any, optimizers: Any) -> None:
            seen.append((trainer.state.current_step, bool(optimizers[0]._optimizer_step_pre_hooks)))

    trainer = ts.Trainer(module, arguments(tmp_path), callbacks=[Looks()])
    trainer.train()
    assert seen == [(step, step <= FIRST_STEPS) for step in range(1, 6)]
    assert trainer._run is not None
    assert trainer._run.step_checks._watch is None


def test_a_replaced_step_gets_no_hooks(tmp_path: Path) -> None:
    """torch would compile a compiled `step` again."""
    hooks: list[int] = []

    class Replaced(Classifier):
        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
            optimizers, schedulers = super().get_optimizers_schedulers(estimated_global_steps_per_epoch, epochs)
            optimizers[0].step = partial(optimizers[0].step)
            return optimizers, schedulers

    class Looks(ts.Callback):
        def on_before_optimizer_step(self, trainer: Any, optimizers: Any) -> None:
            hooks.append(len(optimizers[0]._optimizer_step_pre_hooks))

    ts.Trainer(Replaced(numbers(40)), arguments(tmp_path), callbacks=[Looks()]).train()
    assert hooks == [0] * 5


def test_correct_modules_get_no_warning(tmp_path: Path, caplog: Logs) -> None:
    class Nested(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)  # hooks are called for both

    for limit in (512, 4):
        for make in (torch.optim.SGD, torch.optim.Adam, Nested):
            train(Classifier(numbers(40), optimizer=make, scheduler=True), tmp_path, gpu_batch_size_limit=limit)
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


# --- layers that are added during training


class Grows(Classifier):
    def __init__(self, change: Callable[[Grows], None]) -> None:
        super().__init__(numbers(16))
        self.change, self.spare = change, nn.Linear(2, 2).requires_grad_(False)

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        return self.optimizer, None

    def on_end_train_epoch(self, global_step: int) -> None:
        if global_step == 2:
            self.change(self)


def test_a_later_layer_without_an_optimizer_is_logged_once(tmp_path: Path, caplog: Logs) -> None:
    train(Grows(lambda module: setattr(module, "extra", nn.Linear(4, 2))), tmp_path, epochs=4)
    (told,) = said(caplog, "in no optimizer")
    assert told.startswith(
        "2 trainable parameters of Grows are in no optimizer and will not change: extra.weight, extra.b"
    )


def test_an_unfrozen_layer_without_an_optimizer_is_logged(tmp_path: Path, caplog: Logs) -> None:
    def unfreeze(module: Grows) -> None:
        module.spare.requires_grad_(True)

    train(Grows(unfreeze), tmp_path, epochs=3)
    assert said(caplog, "in no optimizer", "spare.weight, spare.bias")


def test_a_later_layer_with_an_optimizer_is_not_logged(tmp_path: Path, caplog: Logs) -> None:
    def grow(module: Grows) -> None:
        module.extra = nn.Linear(4, 2)
        module.optimizer.add_param_group({"params": module.extra.parameters()})

    train(Grows(grow), tmp_path, epochs=3)
    assert not said(caplog, "in no optimizer")


# --- names of the library


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plan", "a plan"),
        ("log", []),
        ("train_step", 0),
        ("val_step", 0),
        ("test_step", 1.0),
        ("predict_step", None),
        ("on_end_train", []),
        ("forward", nn.Linear(2, 2)),
        ("batch_weight", 2.0),
    ],
)
def test_attributes_with_names_of_the_library_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ts.ModuleContractError, match=rf"Classifier\.{name} was given a \w+.*Choose another name"):
        setattr(Classifier(), name, value)
    kind = type("Own", (Classifier,), {name: value})
    if not isinstance(value, nn.Module):
        with pytest.raises(ts.ModuleContractError, match=rf"Own\.{name} "):
            train(kind(numbers(16)), tmp_path)


def test_a_method_may_be_replaced_by_a_function(tmp_path: Path) -> None:
    module = Classifier(numbers(16))
    plain, calls = module.train_step, list[int]()

    def counted(global_step: int, batch: Any, device: Any) -> Any:
        calls.append(global_step)
        return plain(global_step, batch, device)

    module.train_step = counted  # type: ignore[method-assign]
    module.plan = None
    train(module, tmp_path)
    assert calls == [1, 2]


@pytest.mark.parametrize("name", ["train/loss", "train/loss_epoch", "train/grad_norm", "lr", "lr/1"])
def test_a_metric_of_the_trainer_cannot_be_logged(name: str, tmp_path: Path) -> None:
    class Same(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.log(name, 1.0)
            return super().train_step(global_step, batch, device)

    with pytest.raises(ts.ConfigurationError, match=f"'{name}' is recorded by the trainer. Choose another name"):
        train(Same(numbers(16)), tmp_path)


@pytest.mark.parametrize("place", ["val_step", "on_end_val_epoch"])
@pytest.mark.parametrize("name", ["val/loss", "val/acc"])
def test_a_result_of_the_validation_cannot_be_logged(name: str, place: str, tmp_path: Path) -> None:
    class Same(Scored):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if place == "val_step":
                self.log(name, 1.0)
            return super().val_step(global_step, batch, device)

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            self.log(name, 1.0)

    with pytest.raises(ts.ConfigurationError, match=f"'{name}' is recorded by the trainer"):
        train(Same(lambda loss, found, labels: (loss, found)), tmp_path)


def test_a_loss_that_is_not_recorded_can_be_logged(tmp_path: Path) -> None:
    class Own(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return None

        def on_end_val_epoch(self, global_step: int, key: str = "default") -> None:
            self.log("val/loss", 2.0)

    assert train(Own(numbers(16), validate=True), tmp_path).history.get_latest_metric("val/loss") == 2.0


# --- an optimizer that needs a closure


def test_an_error_of_a_closure_optimizer_has_an_explanation(tmp_path: Path) -> None:
    class Sam(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None, "Sharpness Aware Minimization requires closure"

    with pytest.raises(AssertionError) as raised:
        train(Classifier(numbers(16), optimizer=Sam), tmp_path)
    assert any("Sam.step() was called without a closure" in note for note in raised.value.__notes__)
