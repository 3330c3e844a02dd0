"""Functions for all ports."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from tools.differential.plain import own_random_numbers, seed_sample
from trainstack import DefaultCheckpointerArguments, ModuleInterface, Trainer, TrainerArguments


def weights_of(*models: nn.Module) -> list[Tensor]:
    """Copies of the parameters and buffers of `models`, in their order; sharded tensors are gathered."""
    tensors = [tensor for model in models for tensor in model.state_dict().values()]
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.detach().clone() for tensor in whole]


def loader(dataset: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """The loader of a plain loop, in the order of the dataset.

    By default each iterator of a `DataLoader` draws a number from the global generator. trainstack draws it from
    another one, so the following dropout masks of a plain loop would be different.
    """
    return DataLoader(dataset, batch_size=batch_size, generator=torch.Generator())


class SeededSamples(Dataset[Any]):
    """A dataset whose samples draw by seed, epoch and index, as under trainstack; the generators are restored."""

    def __init__(self, dataset: Any, epoch: int) -> None:
        self.dataset, self.epoch = dataset, epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with own_random_numbers():
            seed_sample(0, self.epoch, index)
            return self.dataset[index]


def train(module: ModuleInterface, *, validate_first: bool = False, **arguments: Any) -> Trainer:
    """Train on the CPU without files and clipping, unless `arguments` of the trainer set them.

    Args:
        module: the port.
        validate_first: also validate before the first step.
        **arguments: fields of `TrainerArguments`.
    """
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "clip_grads": False,
            "device": "cpu",
            "output_dir": folder,
            "writers": [],
            "progress": "none",
            "log_level": "ERROR",
            "checkpointer_args": DefaultCheckpointerArguments(checkpoint=False),
        }
        trainer = Trainer(module, TrainerArguments(**given | arguments))
        if validate_first:
            trainer.validate(log=True)
        trainer.train()
        return trainer
