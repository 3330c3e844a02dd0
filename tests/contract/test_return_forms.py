"""Return values of a step: under each backend string the same forms train, are refused and reach the hooks."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train, weights
from tests.helpers.specs import stacks_that_run_here

SPECS = [spec for spec in stacks_that_run_here() if isinstance(spec, str) and spec.split("-")[0] == "sp"]
single_process = pytest.mark.parametrize("spec", SPECS)


class Named(NamedTuple):
    loss: Tensor
    scores: Tensor


class OwnDict(dict[str, Any]):
    pass


@dataclasses.dataclass
class Data:
    loss: Any
    scores: Any

    def __post_init__(self) -> None:
        self.label = "no field"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    scores: Tensor
    loss: Tensor = dataclasses.field(kw_only=True)


@dataclasses.dataclass
class LikeModelOutput(OrderedDict[str, Any]):
    """A dict and a dataclass, like `ModelOutput` of transformers."""

    loss: Any = None
    scores: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


FORMS: dict[str, Any] = {
    "tensor": lambda loss, scores: loss,
    "tuple": lambda loss, scores: (loss, scores),
    "list": lambda loss, scores: [loss, scores],
    "named tuple": Named,
    "dict": lambda loss, scores: {"loss": loss, "scores": scores, "inner": {"scores": [scores, scores]}},
    "dict of a class": lambda loss, scores: OwnDict(loss=loss, scores=scores),
    "model output": LikeModelOutput,
    "dataclass": Data,
    "frozen dataclass": lambda loss, scores: Frozen(scores, loss=loss),
    "nested dataclass": lambda loss, scores: Data(loss, {"two": [Data(loss, scores), (scores, "text")]}),
    "dataclass in a tuple": lambda loss, scores: (loss, Data(loss, scores)),
    "dataclass in a dict": lambda loss, scores: {"loss": loss, "data": Data(loss, scores)},
}


def forms_and_stacks(*complete: str) -> pytest.MarkDecorator:
    """All forms for the stacks in `complete`, and two for the others; the rest is `long`."""
    pairs = [(name, spec) for name in FORMS for spec in SPECS]
    chosen = [name in ("tuple", "nested dataclass") or spec in complete for name, spec in pairs]
    marks = [() if is_chosen else pytest.mark.long for is_chosen in chosen]
    params = [pytest.param(*pair, marks=mark) for pair, mark in zip(pairs, marks, strict=True)]
    return pytest.mark.parametrize(("name", "spec"), params)


class Returns(Classifier):
    """`train_step` returns one of `FORMS`; `seen` describes the value that the hook got."""

    def __init__(self, form: Any) -> None:
        super().__init__(numbers(16))
        self.form = form
        self.seen: list[Any] = []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        scores = self.net(batch[0])
        return self.form(nn.functional.cross_entropy(scores, batch[1]), scores)

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        self.seen.append(described(outputs))


def described(value: Any) -> Any:
    """The structure of `value`: types, names and shapes, without lengths, which are random in private runs."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape[1:])
    if isinstance(value, dict):
        return type(value), {key: described(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)] + sorted(getattr(value, "__dict__", {}))
        return type(value), {name: described(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return type(value), [described(item) for item in value]
    if isinstance(value, list):
        different: list[Any] = []
        for item in map(described, value):
            different += [] if item in different else [item]
        return type(value), different
    return value


def trained(form: Any, directory: Path | str, spec: str) -> Returns:
    module = Returns(form)
    train(module, directory, backend=spec, epochs=2, gpu_batch_size_limit=4)
    return module


@functools.cache
def reference(name: str, spec: str) -> Returns:
    with tempfile.TemporaryDirectory() as directory:
        return trained(FORMS[name], directory, spec)


def skip_forms_that_apex_cannot_cast(name: str, spec: str) -> None:
    if name == "named tuple" and spec.endswith("amp-apex"):
        pytest.skip("apex casts outputs by type(value)(items), which a named tuple does not take")


@forms_and_stacks("sp", "sp-dp")
@pytest.mark.spec("FN-51")
def test_each_form_trains_and_the_hook_gets_the_same_structure(name: str, spec: str, tmp_path: Path) -> None:
    skip_forms_that_apex_cannot_cast(name, spec)
    module = trained(FORMS[name], tmp_path, spec)

    assert torch.equal(weights(module), weights(reference("tensor", spec)))
    assert not torch.equal(weights(module), weights(Returns(None)))
    assert module.seen == reference(name, "sp").seen
    assert len(module.seen) == 4


NO_LOSSES: dict[str, Any] = {
    "nothing": lambda loss, scores: None,
    "a number": lambda loss, scores: 0.5,
    "a number in a tuple": lambda loss, scores: (0.5, scores),
    "a number in a dict": lambda loss, scores: {"loss": 1},
    "a number in a dataclass": lambda loss, scores: Data(0.5, scores),
    "a string": lambda loss, scores: "loss",
    "an empty tuple": lambda loss, scores: (),
    "a dict without a loss": lambda loss, scores: {"scores": scores},
    "a dataclass without a loss": lambda loss, scores: dataclasses.make_dataclass("Without", ["scores"])(scores),
    "a detached tensor": lambda loss, scores: loss.detach(),
    "a detached tensor in a dataclass": lambda loss, scores: Data(loss.detach(), scores),
}


def refusal(form: Any, directory: Path | str, spec: str) -> str:
    with pytest.raises(ts.ModuleContractError) as caught:
        trained(form, directory, spec)
    return str(caught.value)


@functools.cache
def sp_refusal(name: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        return refusal(NO_LOSSES[name], directory, "sp")


@single_process
@pytest.mark.parametrize("name", NO_LOSSES)
def test_a_step_without_a_loss_is_refused_alike_everywhere(name: str, spec: str, tmp_path: Path) -> None:
    message = refusal(NO_LOSSES[name], tmp_path, spec)

    assert message == sp_refusal(name)
    assert message.startswith("train_step returned ")


@single_process
@pytest.mark.parametrize("form", [lambda loss, scores: Data(scores, scores), lambda loss, scores: scores])
def test_a_loss_of_another_shape_is_refused(form: Any, spec: str, tmp_path: Path) -> None:
    message = refusal(form, tmp_path, spec)

    assert "; a loss is one number. Return its mean over the batch: loss.mean()" in message


@pytest.mark.usefixtures("unprobed")
@forms_and_stacks("sp")
def test_each_form_gives_the_same_validation_loss(name: str, spec: str) -> None:
    skip_forms_that_apex_cannot_cast(name, spec)
    assert len(validation_losses("tensor", spec)) == 1
    assert validation_losses(name, spec) == validation_losses("tensor", spec)


@functools.cache
def validation_losses(name: str, spec: str) -> list[Any]:
    class Validates(Returns):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.train_step(global_step, batch, device)

    module = Validates(FORMS[name])
    module.validates = True
    with tempfile.TemporaryDirectory() as folder:
        return train(module, Path(folder), backend=spec).history.get_metric_values("val/loss")
