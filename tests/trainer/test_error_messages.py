"""Typical mistakes: each gets a sentence that names the given value, the fault and the correction."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train
from trainstack.trainer.tracking.writers import CsvWriter


def broken(**methods: Any) -> Classifier:
    """A classifier with some methods replaced."""
    return type("Broken", (Classifier,), methods)(numbers(16))


def steps(result: Any) -> dict[str, Any]:
    return {"train_step": lambda self, global_step, batch, device: result(self, batch)}


def optimizers(result: Any) -> dict[str, Any]:
    return {"get_optimizers_schedulers": lambda self, *_: result(self)}


def loader(result: Any) -> dict[str, Any]:
    return {"get_train_dataloader": lambda self, sampler, batch_size: result(self, batch_size)}


def val_loader(result: Any) -> dict[str, Any]:
    return {"get_val_dataloaders": lambda self, sampler, batch_size: result(self, batch_size)}


MODULE_MISTAKES = {
    "no loss returned": (
        steps(lambda s, b: None),
        "train_step returned nothing, in which there is no loss.*Return the loss tensor",
    ),
    "dict without loss": (steps(lambda s, b: {"l": 1}), r"a dict with the keys \['l'\].*the key 'loss'"),
    "loss as a number": (steps(lambda s, b: 0.5), r"returned the number 0.5 as the loss.*without \.item\(\)"),
    "loss detached": (steps(lambda s, b: s.net(b[0]).sum().detach()), r"without a gradient graph.*\.detach\(\)"),
    "loss not reduced": (steps(lambda s, b: s.net(b[0])[:, 0]), r"a loss of shape \(8,\).*loss\.mean\(\)"),
    "optimizer over other parameters": (
        optimizers(lambda s: ([torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)], [])),
        r"optimizer 0 \(SGD\) holds 2 parameters that are not Broken's.*self\.parameters\(\)",
    ),
    "no optimizers returned": (optimizers(lambda s: None), r"returned nothing\. Return \(\[optimizer\]"),
    "empty list of optimizers": (optimizers(lambda s: ([], [])), "returned no optimizer"),
    "a scheduler among the optimizers": (
        optimizers(lambda s: ([nn.Linear(1, 1)], [])),
        "returned a Linear among the optimizers",
    ),
    "a scheduler of another optimizer": (
        optimizers(
            lambda s: (
                [torch.optim.SGD(s.parameters(), lr=1.0)],
                [torch.optim.lr_scheduler.StepLR(torch.optim.SGD(s.parameters(), lr=1.0), 1)],
            )
        ),
        "a StepLR belongs to an optimizer that get_optimizers_schedulers did not return",
    ),
    "a plateau scheduler": (
        optimizers(
            lambda s: (lambda o: ([o], [torch.optim.lr_scheduler.ReduceLROnPlateau(o)]))(
                torch.optim.SGD(s.parameters(), lr=1.0)
            )
        ),
        r"ReduceLROnPlateau steps on a value at the end of an epoch. Name the value: SchedulerConfig\(sch.*, monitor=",
    ),
    "no training loader": (loader(lambda s, b: None), "get_train_dataloader returned None. Return a DataLoader"),
    "a data set instead of a loader": (
        loader(lambda s, b: 7),
        "returned a int, which cannot be iterated over. Return a DataLoader",
    ),
    "batch_size not passed on": (
        loader(lambda s, b: DataLoader(s.dataset, batch_size=5)),
        "called with batch_size=8 and returned a loader with batch_size=5. Pass batch_size to the",
    ),
    "an empty data set": (
        loader(lambda s, b: DataLoader(TensorDataset(torch.zeros(0, 6)), batch_size=b)),
        "empty data set",
    ),
    "drop_last leaves nothing": (
        loader(lambda s, b: DataLoader(numbers(5), batch_size=b, drop_last=True)),
        "train_batch_size=8 with drop_last=True and 5 samples leaves no global step",
    ),
    "an empty list for a loader": (
        loader(lambda s, b: []),
        "gave no batch at all. Return a loader with data",
    ),
    "validation data without val_step": (
        {
            **val_loader(lambda s, b: DataLoader(s.dataset, batch_size=b)),
            "val_step": ts.ModuleInterface.val_step,
        },
        r"Broken has no val_step, but get_val_dataloaders returned data. Define val_step\(",
    ),
    "no validation loader under a name": (
        val_loader(lambda s, b: {"a": None}),
        "get_val_dataloaders returned NoneType under 'a'. Return a DataLoader, a dict",
    ),
    "a list of validation loaders": (
        val_loader(lambda s, b: [DataLoader(s.dataset, batch_size=b)]),
        "get_val_dataloaders gave a list. Give several DataLoaders as a dict by name",
    ),
    "the sampler class not called": (
        {
            "get_train_dataloader": lambda self, sampler, batch_size: DataLoader(
                self.dataset, batch_size, sampler=sampler
            )
        },
        r"the sampler class itself. Call it with the data set: .*sampler=sampler\(dataset\)",
    ),
    "a loader that is used up": (
        loader(lambda s, b: iter(())),
        "gave no batch at all. Return a loader with data",
    ),
    "train_step with other arguments": (
        {"train_step": lambda self, batch, batch_idx: None},
        r"train_step\(batch, batch_idx\) cannot be .*Write def train_step\(self, global_step, batch, device\)",
    ),
    "a forward of one's own": (
        {"forward": lambda self, x: x},
        "Broken.forward.* The backend calls this method; keep your network in an attribute",
    ),
    "a hook with too few arguments": (
        {"on_begin_train_epoch": lambda self, epoch: None},
        r"Write def on_begin_train_epoch\(self, global_step, epoch\)",
    ),
    "a hook at the end of an epoch without arguments": (
        {"on_end_train_epoch": lambda self: None},
        r"on_end_train_epoch\(\) cannot be .*Write def on_end_train_epoch\(self, global_step, \*outputs\)",
    ),
    "a hook at the end of a step without arguments": (
        {"on_end_train_step": lambda self: None},
        r"Write def on_end_train_step\(self, global_step, \*outputs\)",
    ),
    "a hook at the end of an epoch with a keyword": (
        {"on_end_train_epoch": lambda self, global_step, *, epoch: None},
        r"Write def on_end_train_epoch\(self, global_step, \*outputs\)",
    ),
    "a hook without key": (
        {"on_end_val_epoch": lambda self, global_step, loss: None},
        r"Write def on_end_val_epoch\(self, global_step, \*outputs, key\)",
    ),
}


@pytest.mark.parametrize("mistake", MODULE_MISTAKES)
@pytest.mark.spec("FN-51", "F114", "FN-27")
def test_a_module_that_breaks_its_contract_is_refused(mistake: str, tmp_path: Path) -> None:
    methods, message = MODULE_MISTAKES[mistake]

    with pytest.raises((ts.ModuleContractError, ts.ConfigurationError), match=message):
        train(broken(**methods), tmp_path)


@pytest.mark.parametrize("limit", [{"max_steps": 5}, {"max_steps": 0.5}, {"fast_dev_run": True}], ids=str)
@pytest.mark.parametrize("mistake", ["drop_last leaves nothing", "an empty list for a loader"])
def test_data_without_a_global_step_are_refused_with_step_limits(
    mistake: str, limit: dict[str, Any], tmp_path: Path
) -> None:
    methods, message = MODULE_MISTAKES[mistake]

    with pytest.raises((ts.ModuleContractError, ts.ConfigurationError), match=message):
        train(broken(**methods), tmp_path, **limit)


ARGUMENT_MISTAKES = {
    "unknown backend": ({"backend": "sp-apm"}, r"no layer has the name 'apm'. Did you mean 'amp'\?"),
    "wrong order": ({"backend": "amp-sp"}, "'sp' goes outside 'amp'. Write 'sp-amp'."),
    "two precisions": ({"backend": "sp-amp-bf16"}, "fill the same slot .*Write 'sp-amp' or 'sp-bf16'."),
    "negative epochs": ({"epochs": -1}, "epochs=-1: write a whole number, 0 or more"),
    "a batch of zero": ({"train_batch_size": 0}, "train_batch_size=0: write a whole number, 1 or more"),
    "a float batch": ({"val_batch_size": 8.0}, "val_batch_size=8.0: write a whole number"),
    "no clipping by zero": ({"max_grad_norm": 0.0}, "max_grad_norm=0.0: .*clip_grads=False for no clipping"),
    "two clippings": ({"clip_grad_value": 1.0, "max_grad_norm": 2.0}, "clipped once, by value or by norm"),
    "an unknown choice": ({"nonfinite": "ignore"}, "nonfinite='ignore': write one of 'raise', 'skip'"),
    "an unknown device": ({"device": "tpux"}, "device='tpux': torch has no such device"),
    "no writers": ({"writers": None}, r"writers=None: write a list .*or \[\] for none"),
    "a single writer": ({"writers": CsvWriter("metrics.csv")}, "write a list of names and Writer objects"),
    "the class of a writer": ({"writers": CsvWriter}, "write a list of names and Writer objects"),
    "the class of a writer in a list": ({"writers": [CsvWriter]}, r"Write an object: CsvWriter\(\.\.\.\)"),
    "no backend options": ({"backend_options": None}, "backend_options=None: write a dict of options for each layer"),
    "options other than a dict": ({"backend_options": {"amp": 1}}, "by its token: {'amp': {'init_scale': 1024.0}}"),
    "statistics with another field": ({"stats_args": {"log_stps": 1}}, r"log_stps"),
    "resume in quotes": ({"resume": "True"}, "resume='True' would be the path .* Write resume=True, not in quotes"),
    "no resume in quotes": ({"resume": "no"}, "Write resume=False, not in quotes"),
    "writers as a string": ({"writers": "csv"}, r"writers='csv': write a list: writers=\['csv'\]"),
    "PyMarlin's flag against the string": ({"amp_backend_native": True}, "Write backend='auto-amp'"),
    "privacy without a private backend": (
        {"differential_privacy_args": ts.DifferentialPrivacyArguments(delta=1e-5, target_epsilon=1.0)},
        "the run would not be private",
    ),
    "resume with nothing there": ({"resume": True}, "no checkpoint .* does not exist.*resume='auto'"),
    "resume from a path that is not there": ({"resume": "nowhere/at/all"}, "nowhere/at/all"),
    "options for a layer that is not there": (
        {"backend_options": {"amp": {"init_scale": 1.0}}},
        r"backend_options={'amp': \.\.\.} with backend='auto', whose layers are 'sp'",
    ),
    "options a layer does not take": (
        {"backend": "sp-amp", "backend_options": {"amp": {"scale": 1.0}}},
        "layer 'amp' does not take the options {'scale': 1.0}",
    ),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ts.TrainerArguments)])
def test_values_of_a_wrong_type_raise_configuration_errors_only(name: str) -> None:
    for value in (None, 1, 1.5, "x", b"x", [], ["x"], {}, {"amp": 1}, {"a"}, object(), int):
        with contextlib.suppress(ts.ConfigurationError):  # or accepts the value
            ts.TrainerArguments(**{name: value})


@pytest.mark.parametrize("mistake", ARGUMENT_MISTAKES)
@pytest.mark.spec("PMB-02", "PMT-04", "F115")
def test_wrong_arguments_are_refused_with_a_correction(mistake: str, tmp_path: Path) -> None:
    changes, message = ARGUMENT_MISTAKES[mistake]

    with pytest.raises((ts.ConfigurationError, ts.CheckpointError), match=re.compile(message, re.DOTALL)):
        train(Classifier(numbers(16)), tmp_path, **changes)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((nn.Linear(1, 1),), "given a Linear. Write an instance of a class derived from ModuleInterface"),
        ((Classifier,), "given the class Classifier. Write an instance"),
        ((Classifier(), {"epochs": 1}), r"given a dict. Write TrainerArguments\(\.\.\.\)"),
        ((Classifier(), ts.TrainerArguments(), 3), "given a int. Write a backend string"),
        ((Classifier(), ts.TrainerArguments(), None, "checkpoints"), "given a str. Derive it from Abstract"),
    ],
)
def test_a_trainer_refuses_objects_of_wrong_types(parts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=message):
        ts.Trainer(*parts, *([ts.TrainerArguments()] if len(parts) == 1 else []))


def test_a_stack_as_backend_argument_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match=r"string such as 'sp-bf16'.*Trainer\(\.\.\., trainer_backend="):
        ts.TrainerArguments(backend=ts.build_trainer_backend("sp"))  # type: ignore[arg-type]


def test_a_module_without_required_methods_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError, match="train_step"):
        type("Half", (ts.ModuleInterface,), {})()


def test_an_error_in_a_hook_names_the_hook(tmp_path: Path) -> None:
    def on_end_train_step(self: Any, global_step: int) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        train(broken(on_end_train_step=on_end_train_step), tmp_path)

    assert "raised in Broken.on_end_train_step" in caught.value.__notes__


@pytest.mark.spec("FN-42")
def test_an_error_in_a_step_names_epoch_step_and_samples(tmp_path: Path) -> None:
    def train_step(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        train(broken(train_step=train_step), tmp_path)

    assert caught.value.__notes__[0].startswith("in epoch 0, global step 1, with the samples ")


def test_a_typo_in_the_name_of_a_hook_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(broken(on_end_validation_epoch=lambda self: None), tmp_path)

    assert "Broken.on_end_validation_epoch is not a hook" in caplog.text
    assert "Did you mean 'on_end_val_epoch'?" in caplog.text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("get_val_dataloader", "get_val_dataloaders"),
        ("get_vla_dataloaders", "get_val_dataloaders"),
        ("val_dataloader", "get_val_dataloaders"),
        ("validation_step", "val_step"),
        ("eval_step", "val_step"),
    ],
)
def test_a_typo_in_the_name_of_a_step_is_logged(
    name: str, meant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = {meant: getattr(ts.ModuleInterface, meant), name: lambda self, *given: None}
    train(broken(**lacking), tmp_path)

    assert f"Broken.{name} is never called by the trainer. Did you mean {meant!r}?" in caplog.text


@pytest.mark.parametrize("name", ["get_val_dataloader", "validation_step", "get_val_dataset", "interval", "last_step"])
def test_other_methods_of_the_module_are_not_reported(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(broken(**{name: lambda self: None}), tmp_path)
    train(
        broken(get_val_dataset=lambda self: None, get_val_dataloaders=ts.ModuleInterface.get_val_dataloaders), tmp_path
    )

    assert "is never called" not in caplog.text


def test_a_hook_may_omit_the_outputs(tmp_path: Path) -> None:
    seen = []
    module = broken(on_end_val_epoch=lambda self, global_step, key="default": seen.append((global_step, key)))
    module.validates = True
    train(module, tmp_path)

    assert seen == [(2, "default")]
