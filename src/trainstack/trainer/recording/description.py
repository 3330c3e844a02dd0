"""The description of a start in the step log: as in a checkpoint, with seed, data and weights of the run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainstack.trainer import start_description
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.changes import Description
from trainstack.trainer.core.fingerprints import checksums, hash_text
from trainstack.trainer.core.module_extras import without_wrappers
from trainstack.trainer.data.training_data import TrainingData

_MASK = (1 << 64) - 1  # shows a signed checksum as unsigned


def describe_start(context: RunContext, data: TrainingData, optimizers: Sequence[Optimizer]) -> Description:
    """The groups "arguments", "environment", "data", "code", "optimizers" and "weights".

    Of sharded weights, the checksums are those of the part of this process.
    """
    described = start_description.describe_start(context, data)
    described["arguments"]["seed"] = str(context.state.seed)  # a resumed run keeps its first seed
    described["data"]["version of the order"] = str(context.state.order_version)
    if not context.stack.is_private:  # a private run must store nothing about its records
        described["data"]["samples in an epoch"] = str(data.plan.samples_per_epoch)
        described["data"] |= {f"sample {index}": hash_text(repr(one)) for index, one in data.sample_hashes.items()}
    made = start_description.describe_optimizers(optimizers)
    return {**described, "optimizers": made, "weights": _weights(context.module)}


def _weights(module: nn.Module) -> dict[str, str]:
    """The checksums of parameters and buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {without_wrappers(name): one for name, one in named if not is_lazy(one) and not one.is_meta}
    sums = checksums(tensors.values())
    return {name: f"{value & _MASK:016x}" for name, value in zip(tensors, sums, strict=True)}
