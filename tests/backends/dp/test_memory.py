"""Values that a module keeps between forward passes: refused where losses depend on them, and only there."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import FEATURES, Classifier, arguments
from tests.helpers.private_runs import private, promise
from tests.helpers.private_shapes import Plain, run, trained, vectors
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import GradientMode, Unsupported
from trainstack.backends.dp.modes.selection import choose_mode

GLOBAL = np.random.default_rng(0)


def chosen(module: nn.Module, asked: str = "auto") -> GradientMode:
    return choose_mode(asked, module, trained(module), FlatClipper(1.0), run, vectors(6), 6)


class Remembering(Plain):
    """Divides a loss by the value that `kept` computes from the losses before."""

    def __init__(self, kept: Any, average: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.kept, self.average = kept, average

    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)
        return loss / self.average(self, loss.detach())


def _in_a_number(module: Any, loss: Tensor) -> float:
    module.kept = 0.9 * module.kept + 0.1 * loss.item()
    return float(module.kept)


def _in_items(module: Any, loss: Tensor) -> Tensor:
    module.kept.append(loss)
    return torch.stack(list(module.kept)).mean()


def _in_a_dict(module: Any, loss: Tensor) -> Tensor:
    module.kept["mean"] = 0.5 * module.kept.get("mean", 1.0) + 0.5 * loss
    return module.kept["mean"]


class _Bank:
    mean = 1.0


def _in_an_object(module: Any, loss: Tensor) -> float:
    module.kept.mean = 0.5 * module.kept.mean + 0.5 * loss.item()
    return module.kept.mean


@pytest.mark.parametrize("asked", ["auto", "loop", "vmap", "bookkeeping"])
@pytest.mark.parametrize(
    ("kept", "average"),
    [
        (lambda: 1.0, _in_a_number),
        (list, _in_items),
        (lambda: deque(maxlen=4), _in_items),
        (dict, _in_a_dict),
        (_Bank, _in_an_object),
    ],
    ids=["number", "list", "deque", "dict", "object"],
)
def test_memory_of_any_kind_is_refused_by_name(kept: Callable[[], Any], average: Any, asked: str) -> None:
    with pytest.raises(Unsupported, match=r"^kept changes in a forward pass, and the same records"):
        chosen(Remembering(kept(), average), asked)


def test_memory_outside_of_the_module_is_refused_without_a_name() -> None:
    elsewhere = [1.0]

    def average(module: Any, loss: Tensor) -> float:
        elsewhere[0] = 0.9 * elsewhere[0] + 0.1 * loss.item()
        return elsewhere[0]

    with pytest.raises(Unsupported, match=r"^state that train_step keeps changes"):
        chosen(Remembering(None, average))


def test_memory_together_with_random_numbers_is_refused() -> None:
    def average(module: Any, loss: Tensor) -> float:
        return _in_a_number(module, loss) + float(np.random.uniform())

    with pytest.raises(Unsupported, match=r"^kept changes"):
        chosen(Remembering(1.0, average))


@pytest.mark.parametrize("asked", ["auto", "loop"])
def test_memory_that_shows_after_some_records_only_is_refused(asked: str) -> None:
    def average(module: Any, loss: Tensor) -> Tensor:
        module.kept, before = loss, module.kept
        return before

    inputs, labels = vectors(6)
    for same in (0, 2):  # the first, and the last of half of the probe, are the last of the probe once more
        inputs[same], labels[same] = inputs[5], labels[5]
    module = Remembering(None, average)
    module.kept = Plain.train_step(module, (inputs[5:], labels[5:])).detach()
    with pytest.raises(Unsupported, match=r"^kept changes in a forward pass"):
        choose_mode(asked, module, trained(module), FlatClipper(1.0), run, (inputs, labels), 6)


def test_memory_is_found_when_the_repeated_record_has_no_gradient() -> None:
    class Masked(Remembering):
        def train_step(self, batch: Any) -> Any:
            return super().train_step(batch) * batch[0].any(1).float().mean()

    inputs, labels = vectors(6)
    inputs[0] = 0.0
    module = Masked(1.0, _in_a_number)
    with pytest.raises(Unsupported, match=r"^kept changes in a forward pass"):
        choose_mode("loop", module, trained(module), FlatClipper(1.0), run, (inputs, labels), 6)


def test_a_private_run_with_a_memory_does_not_begin(tmp_path: Path) -> None:
    class Balanced(Classifier):
        mean = 1.0

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.mean = 0.9 * self.mean + 0.1 * loss.item()
            return loss / self.mean

    with pytest.raises(ts.PrivacyError, match="mean changes in a forward pass"):
        ts.Trainer(Balanced(), private(tmp_path, promise(noise_multiplier=1.0))).train()


# --- correct modules are accepted


class Counting(Plain):
    """Keeps a count and every loss, for the user to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.losses = 0, []  # type: ignore[var-annotated]

    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)
        self.steps += 1
        self.losses.append(loss.detach())
        return loss


def test_counts_and_lists_without_influence_on_losses_are_accepted() -> None:
    assert chosen(Counting()).name == "bookkeeping"


class _Augmentation:
    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator


class Drawing(Classifier):
    """Noise on the inputs that nothing holds still."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.torch = kind, torch.Generator().manual_seed(1)
        self.own: Any = {"python": random.Random(1), "numpy": _Augmentation(np.random.default_rng(1))}

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return F.cross_entropy(self.net(batch[0] + self.noise(batch[0])), batch[1])

    def noise(self, x: Tensor) -> Any:
        return {
            "exponential": lambda: torch.empty_like(x).exponential_(),
            "numpy": lambda: float(np.random.normal()),
            "python": random.random,
            "a generator of torch": lambda: torch.randint(0, 3, x.shape[-1:], generator=self.torch),
            "a generator of numpy": lambda: float(self.own["numpy"].generator.normal()),
            "a generator of python": lambda: self.own["python"].gauss(0.0, 1.0),
            "a global generator": lambda: float(GLOBAL.normal()),
        }[self.kind]()

    def states(self) -> list[Any]:
        own = (self.own["numpy"].generator.bit_generator.state, self.own["python"].getstate())
        everywhere = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index, union-attr]
        return [*own, self.torch.get_state().tolist(), GLOBAL.bit_generator.state, *everywhere]


KINDS = ("exponential", "numpy", "python", *(f"a generator of {kind}" for kind in ("torch", "numpy", "python")))


@pytest.mark.parametrize("asked", ["vmap", "loop"])
@pytest.mark.parametrize("kind", [*KINDS, "a global generator"])
def test_random_numbers_are_not_memory_and_generators_keep_their_state(kind: str, asked: str, tmp_path: Path) -> None:
    states = []
    for backend in ("sp", "sp-dp"):
        module = Drawing(kind)
        GLOBAL.bit_generator.state = np.random.default_rng(0).bit_generator.state
        args = {"sp": arguments(tmp_path), "sp-dp": private(tmp_path, promise(noise_multiplier=1.0, grad_mode=asked))}
        trainer = ts.Trainer(module, args[backend])
        assert trainer.plan.total_steps == 6
        states.append(module.states())
        trainer.close()
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_dropout_between_recurrent_layers_is_repeatable(kind: str, tmp_path: Path) -> None:
    class Recurrent(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = getattr(nn, kind)(FEATURES, FEATURES, 2, dropout=0.5, batch_first=True)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return F.cross_entropy(self.net(self.layers(batch[0][:, None])[0][:, 0]), batch[1])

    trainer = ts.Trainer(Recurrent(), private(tmp_path, promise(noise_multiplier=1.0, grad_mode="loop")))
    assert trainer.privacy_statement().grad_mode == "loop"
    trainer.close()
