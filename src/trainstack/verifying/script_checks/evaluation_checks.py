"""Checks of the validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Subset

from trainstack.verifying.script_checks.evidence import Evidence, digest, holds_generator
from trainstack.verifying.script_checks.findings import Found, check

_ENOUGH_SAMPLES = 8
_MOST_SHARED = 0.9


@check("D503", "problem", "validation on the training data")
def validates_on_training_data(evidence: Evidence) -> Iterator[Found]:
    """The same data set, indices of one data set, or samples with the same content."""
    if evidence.args.overfit_batches:
        return
    for name, loader in evidence.val_loaders.items():
        if isinstance(loader, DataLoader) and isinstance(evidence.loader, DataLoader):
            shared = _shared(evidence, name, loader)
            if shared:
                which = "" if name == "default" else f" {name!r}"
                yield (
                    f"the validation data{which} is training data: {shared}",
                    "Split the data first: train, val = torch.utils.data.random_split(dataset, [0.9, 0.1]).",
                    evidence.method_place("get_val_dataloaders"),
                )


def _shared(evidence: Evidence, name: str, loader: Any) -> str:
    """The data that training and validation share, as text; "" where there is none."""
    train, val = evidence.loader.dataset, loader.dataset
    if train is val:
        return "both loaders have the same data set"
    (base, indices), (other, others) = _base(train), _base(val)
    if base is other and (indices is not None or others is not None):
        both = set(_indices(train)) & set(_indices(val))
        return f"{len(both)} samples are in both" if both else ""
    if holds_generator(train) or holds_generator(val):
        return ""
    known = {digest(sample) for sample in evidence.samples.values()}
    seen = [digest(sample) for sample in evidence.val_samples.get(name, {}).values()]
    distinct = set(seen)
    if len(distinct) < _ENOUGH_SAMPLES or len(distinct) < len(seen) // 2:
        return ""
    share = sum(one in known for one in distinct) / len(distinct)
    return f"{share:.0%} of the samples that were read are in both" if share >= _MOST_SHARED else ""


def _base(dataset: Any) -> tuple[Any, Any]:
    return (dataset.dataset, dataset.indices) if isinstance(dataset, Subset) else (dataset, None)


def _indices(dataset: Any) -> Any:
    return dataset.indices if isinstance(dataset, Subset) else range(len(dataset))


@check("D504", "problem", "a monitor that no validation records")
def unknown_monitor(evidence: Evidence) -> Iterator[Found]:
    """Names of `TrainerArguments.monitor` and `DefaultCheckpointerArguments.monitor`."""
    if not evidence.metrics:
        return
    given = {"monitor": evidence.args.monitor, "checkpointer_args.monitor": evidence.args.checkpointer_args.monitor}
    default = type(evidence.args.checkpointer_args)().monitor
    recorded = sorted(name for name in evidence.metrics if name.startswith("val/"))
    for argument, name in given.items():
        if name is None or (argument != "monitor" and name == default) or not name.startswith("val/"):
            continue
        if name not in evidence.metrics:
            yield (
                f"{argument}={name!r} is not recorded by the validation, which records {', '.join(recorded)}",
                f"Write {argument}={recorded[0]!r}." if recorded else "Return the loss from val_step.",
            )


@check("D505", "hint", "a val_step without validation data")
def no_validation_data(evidence: Evidence) -> Iterator[Found]:
    """Then nothing is validated."""
    step = getattr(type(evidence.module), "val_step")  # noqa: B009 - a function, whose module tells who wrote it
    defines = not step.__module__.startswith("trainstack.")
    if defines and evidence.error is None and not evidence.val_loaders:
        yield (
            f"{type(evidence.module).__name__} has val_step, and get_val_dataloaders returns no data",
            "Define get_val_dataloaders(self, sampler, batch_size), or remove val_step.",
            evidence.method_place("val_step"),
        )
