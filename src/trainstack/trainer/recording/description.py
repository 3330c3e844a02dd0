"""The description of a start in the step log: that of a checkpoint, with the run's seed, data and weights."""

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

_MASK = (1 << 64) - 1


def describe_start(context: RunContext, data: TrainingData, optimizers: Sequence[Optimizer]) -> Description:
    """The groups "arguments", "environment", "data", "code", "optimizers" and "weights".

    The checksums of the weights are those of what this process has of them.
    """
    described = start_description.describe_start(context, data)
    described["arguments"]["seed"] = str(context.state.seed)  # a resumed run keeps its own
    described["data"]["version of the order"] = str(context.state.order_version)
    if not context.stack.is_private:  # whose records leave no trace
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
