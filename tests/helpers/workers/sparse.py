"""Functions of the ranks of `test_sparse_buffers.py`."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments


class Graph(nn.Module):
    """A layer with sparse buffers, which differ between ranks at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        values = (1.0 + int(os.environ["RANK"])) * torch.eye(8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls CSR a beta, once a process
            self.register_buffer("coo", values.to_sparse())
            self.register_buffer("csr", values.to_sparse_csr(), persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        return self.linear(inputs) * (self.coo.to_dense() + self.csr.to_dense()).sum()  # type: ignore[operator]


def train_with_sparse_buffers(folder: str) -> dict[str, Any]:
    """Train one epoch, and return the buffers and the weights."""
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    network = Graph()
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = ts.SupervisedModule(network, nn.MSELoss(), "adam", data, data)
    trainer = ts.Trainer(module, arguments(folder, checkpointer_args=ts.DefaultCheckpointerArguments()))
    trainer.train()
    trainer.close()
    diagonals = [buffer.to_dense().diagonal().tolist() for buffer in network.buffers()]
    return {
        "backend": trainer.trainer_backend.spec,
        "diagonals": diagonals,
        "weight": network.linear.weight.tolist(),
    }
