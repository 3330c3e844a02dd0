"""Mistakes that could silently change a training, and the sentence of the library about each.

`python -m tools.silent_mistakes` makes each mistake in a small training, and prints whether its sentence is in the log,
in the printed plan, or in an error. The exit status is 1 if one sentence is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, torch.arange(40) % 3)


class Base(ts.ModuleInterface):
    """A module without a mistake; each case replaces a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = nn.Linear(4, 3)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(DATA, batch_size, sampler=sampler(DATA))

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(DATA, batch_size, sampler=sampler(DATA))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return self.optimizer, None

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        scores = self.net(batch[0])
        return functional.cross_entropy(scores, batch[1]), scores.argmax(1)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A case.

    Attributes:
        name: the mistake.
        sentence: the part of the message that names the mistake.
        make: a function that makes the module.
        arguments: changes of the arguments of all cases.
    """

    name: str
    sentence: str
    make: Callable[[], ts.ModuleInterface]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def messages(self) -> str:
        """All messages of the training: log, printed plan and error."""
        logger, screen = logging.getLogger("trainstack"), io.StringIO()
        handler = logging.StreamHandler(screen)
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.redirect_stdout(screen):
                warnings.simplefilter("ignore")
                self._train(folder, screen)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        return " ".join(screen.getvalue().split())

    def _train(self, folder: str, screen: io.StringIO) -> None:
        given: dict[str, Any] = {"epochs": 2, "train_batch_size": 8, "val_batch_size": 16, "writers": ["stdout"]}
        given |= {"progress": "none", "report": False, "record": "off", "output_dir": f"{folder}/run"}
        given["checkpointer_args"] = ts.DefaultCheckpointerArguments(checkpoint=False)
        try:
            args = ts.TrainerArguments(**{**given, **self.arguments})
            ts.Trainer(self.make(), args).train()
        except Exception as error:
            screen.write("\n".join([str(error), *getattr(error, "__notes__", ())]))

    def is_named(self) -> bool:
        """Whether the sentence is among the messages."""
        return self.sentence in self.messages()


def module(**methods: Any) -> Callable[[], ts.ModuleInterface]:
    """A function that makes a `Base` with some methods replaced."""
    return lambda: type("Mine", (Base,), methods)()


def step(function: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """A `train_step` with the body of `function`."""
    return {"train_step": lambda self, global_step, batch, device: function(self, batch)}


def val_step(function: Callable[[Any, Any, Any], Any], **more: Any) -> Callable[[], ts.ModuleInterface]:
    """A module whose `val_step` returns `function(scores, labels, loss)`."""

    def evaluate(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        scores = self.net(batch[0])
        return function(scores, batch[1], functional.cross_entropy(scores, batch[1]))

    return module(val_step=evaluate, **more)


def with_parts(make: Callable[[], Any], name: str = "layers") -> Callable[[], ts.ModuleInterface]:
    """A function that makes a module with the attribute `name`."""

    def made() -> ts.ModuleInterface:
        mine = Base()
        setattr(mine, name, make())
        return mine

    return made


class TwoParts(Base):
    """A module with a body in front of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)


def body(function: Callable[[Any, Any], Tensor]) -> Callable[[], ts.ModuleInterface]:
    """A function that makes a module whose head gets `function(module, inputs)`."""

    def train_step(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        return functional.cross_entropy(self.net(function(self, batch[0])), batch[1])

    return lambda: type("Mine", (TwoParts,), {"train_step": train_step})()


def without_gradient(mine: Any, inputs: Tensor) -> Tensor:
    """The output of the body under `torch.no_grad`."""
    with torch.no_grad():
        return mine.body(inputs)  # type: ignore[no-any-return]


def by_hand(call: Callable[[Any, Any], Any]) -> Callable[[], ts.ModuleInterface]:
    """A function that makes a module whose `train_step` calls `call(module, loss)`."""

    def train_step(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        call(self, loss)
        return loss

    return module(train_step=train_step)


def scheduled(make: Callable[[Any], Any], then: Callable[[Any], Any] = lambda scheduler: None) -> Any:
    """A function that makes a module with a scheduler, and calls `then(scheduler)` in each step."""

    def get(self: Any, *_: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.scheduler = make(optimizer)
        return optimizer, self.scheduler

    def train_step(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        then(self.scheduler)
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    return module(get_optimizers_schedulers=get, train_step=train_step)


def grows(self: Any, global_step: int) -> None:
    """A hook that adds a layer."""
    self.extra = nn.Linear(4, 2)


def own_batches(self: Any, sampler: Any, batch_size: int) -> Any:
    """A loader that ignores the batch size."""
    return iter([(INPUTS[:8], DATA.tensors[1][:8])] * 3)


class Carries(Base):
    """A module with a state that is carried from batch to batch."""

    splits_batches = False


class Doubles(Base):
    """A module with inputs of float64 and without validation."""

    get_val_dataloaders = ts.ModuleInterface.get_val_dataloaders

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        return functional.cross_entropy(self.net(batch[0].double()), batch[1])


NOT_REGISTERED = "which PyTorch does not register: they are not trained, moved or saved."
NO_GRADIENT = "received no gradient in the first step: body.weight, body.bias."
NO_LOSS = "no loss was found, so no val/loss is recorded."
IN_EPOCHS = "it steps once after each of"
SPLIT = {"gpu_batch_size_limit": 4}

CASES = (
    Mistake(
        "booleans as predictions of a metric",
        "val_step returned a boolean tensor, and the metric 'acc' would compare it with the labels.",
        val_step(
            lambda scores, labels, loss: (loss, scores.argmax(1) == labels),
            metrics={"acc": ts.metric_of(lambda predictions, target: (predictions == target).float())},
        ),
    ),
    Mistake("layers in a list", NOT_REGISTERED, with_parts(lambda: [nn.Linear(4, 4)])),
    Mistake("layers in a dict", NOT_REGISTERED, with_parts(lambda: {"a": nn.Linear(4, 4)})),
    Mistake("layers in nested lists", NOT_REGISTERED, with_parts(lambda: [[nn.Linear(4, 4)]])),
    Mistake("parameters in a tuple", NOT_REGISTERED, with_parts(lambda: (nn.Parameter(torch.zeros(2)),))),
    Mistake("a part under no_grad", NO_GRADIENT, body(without_gradient)),
    Mistake("a part that is detached", NO_GRADIENT, body(lambda mine, inputs: mine.body(inputs).detach())),
    Mistake("a part that is not used", NO_GRADIENT, body(lambda mine, inputs: inputs)),
    Mistake("no loss in a tuple of val_step", NO_LOSS, val_step(lambda scores, labels, loss: (scores, labels))),
    Mistake("a loss under another key", NO_LOSS, val_step(lambda scores, labels, loss: {"val_loss": loss})),
    Mistake("numbers in a dict", NO_LOSS, val_step(lambda scores, labels, loss: {"ce": loss.item()})),
    Mistake("the loss second", NO_LOSS, val_step(lambda scores, labels, loss: (scores, loss))),
    Mistake(
        "zero_grad by hand, with micro-batches",
        "called zero_grad() itself in global step 1",
        by_hand(lambda mine, loss: mine.zero_grad()),
        SPLIT,
    ),
    Mistake(
        "backward by hand",
        "called backward() itself in global step 1",
        by_hand(lambda mine, loss: loss.backward(retain_graph=True)),
    ),
    Mistake(
        "an optimizer step by hand",
        "called optimizer.step() itself in global step 1",
        module(**step(lambda mine, batch: (mine.optimizer.step(), mine.net(batch[0]).square().mean())[1])),
    ),
    Mistake(
        "a scheduler step by hand",
        "called scheduler.step() itself in global step",
        scheduled(lambda one: lr_scheduler.LinearLR(one, 1.0, 0.5, 10), lambda scheduler: scheduler.step()),
    ),
    Mistake("StepLR in epochs", IN_EPOCHS, scheduled(lambda one: lr_scheduler.StepLR(one, 1, 0.5))),
    Mistake("CosineAnnealingLR in epochs", IN_EPOCHS, scheduled(lambda one: lr_scheduler.CosineAnnealingLR(one, 2))),
    Mistake("LinearLR in epochs", IN_EPOCHS, scheduled(lambda one: lr_scheduler.LinearLR(one, 1.0, 0.1, 2))),
    Mistake("MultiStepLR in epochs", IN_EPOCHS, scheduled(lambda one: lr_scheduler.MultiStepLR(one, [1, 2]))),
    Mistake("OneCycleLR in epochs", IN_EPOCHS, scheduled(lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=2))),
    Mistake("gradients are clipped by default", "clip", Base),
    Mistake("an attribute called plan", "Choose another name for the attribute.", with_parts(lambda: "mine", "plan")),
    Mistake("an attribute called log", "Choose another name for the attribute.", with_parts(list, "log")),
    Mistake(
        "a metric that the trainer records",
        "'train/loss' is recorded by the trainer. Choose another name",
        module(**step(lambda mine, batch: (mine.log("train/loss", 1.0), mine.net(batch[0]).square().mean())[1])),
    ),
    Mistake(
        "a layer that is added in training",
        "are in no optimizer and will not change: extra.weight, extra.bias.",
        module(on_end_train_epoch=grows),
    ),
    Mistake("a monitor_mode in full", "write one of 'auto', 'min', 'max'", Base, {"monitor_mode": "maximum"}),
    Mistake("a monitor with a slip", "Did you mean 'val/loss'?", Base, {"monitor": "val/los", "monitor_mode": "min"}),
    Mistake("a network in eval mode", "had trainable parameters in eval mode", lambda: Base().eval()),
    Mistake(
        "a loss that is a sum, with micro-batches",
        "seems to return a sum over samples, and a step averages the losses of its 2 parts",
        module(**step(lambda mine, batch: functional.cross_entropy(mine.net(batch[0]), batch[1], reduction="sum"))),
        SPLIT,
    ),
    Mistake("a state from batch to batch, with micro-batches", "splits_batches is False", Carries, SPLIT),
    Mistake(
        "bf16 with a model in float64",
        "the layer 'bf16' converts float32 alone, so it changes nothing",
        lambda: Doubles().double(),
        {"backend": "sp-bf16"},
    ),
    Mistake(
        "a loader that ignores batch_size",
        "the first global step has 8 samples, and train_batch_size=4",
        module(get_train_dataloader=own_batches),
        {"train_batch_size": 4, "epochs": 1},
    ),
    Mistake(
        "a slip in the name of a hook",
        "is not a hook and is never called by the trainer. Did you mean 'on_end_val_epoch'?",
        module(on_end_validation_epoch=lambda self: None),
    ),
    Mistake(
        "a slip in the name of val_step",
        "Did you mean 'val_step'? Without it, training does not validate.",
        module(validation_step=lambda self, batch: None, val_step=ts.ModuleInterface.val_step,
               get_val_dataloaders=ts.ModuleInterface.get_val_dataloaders),
    ),
)  # fmt: skip


def report(cases: tuple[Mistake, ...] = CASES) -> Iterator[tuple[Mistake, bool]]:
    """Each case, and whether its sentence is in the messages."""
    for case in cases:
        torch.manual_seed(0)
        yield case, case.is_named()


def main() -> int:
    """Print the table. Returns the exit code."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.getLogger("trainstack").propagate = False
    count = 0
    for case, is_named in report():
        count += is_named
        print(f"{'named ' if is_named else 'SILENT'}  {case.name}")
    print(f"{count} of {len(CASES)} named")
    return 0 if count == len(CASES) else 1


if __name__ == "__main__":
    sys.exit(main())
