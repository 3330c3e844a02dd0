"""The private training that `ledger.py` kills."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

RECORDS, BATCH, SIGMA, DELTA = 200, 4, 1.0, 1e-4


class Noted(torch.optim.SGD):
    """Records each step in the file of its process."""

    truth = -1

    def step(self, closure: Any = None) -> Any:
        os.write(Noted.truth, b".")
        return super().step(closure)


def train(folder: str, ledger: str, truth: str) -> None:
    """Train in `folder`, from its newest checkpoint if there is one; the battery kills this process."""
    Noted.truth = os.open(truth, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    inputs = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
    module = ts.SupervisedModule(
        nn.Linear(4, 2),
        nn.CrossEntropyLoss(),
        lambda parameters: Noted(parameters, lr=0.1),
        TensorDataset(inputs, (inputs.sum(1) > 0).long()),
    )
    args = ts.TrainerArguments(
        backend="sp-dp",
        device="cpu",
        epochs=10**4,
        train_batch_size=BATCH,
        resume="auto",
        output_dir=folder,
        writers=[],
        progress="none",
        checkpointer_args=ts.DefaultCheckpointerArguments(every_n_steps=7),
        differential_privacy_args=ts.DifferentialPrivacyArguments(
            delta=DELTA, noise_multiplier=SIGMA, accountant="rdp", ledger=ledger, dataset_name="killed"
        ),
    )
    ts.Trainer(module, args).train()
