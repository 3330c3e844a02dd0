"""A run whose last step has one sample, so that all ranks but one run a borrowed micro-batch in it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers


class Watched(Classifier):
    """Draws numbers, writes to buffers and logs in each `train_step`, and records the arguments of its hooks."""

    def __init__(self, samples: int, source: str) -> None:
        super().__init__(numbers(samples, dtype=torch.float64), dtype=torch.float64)
        self.source = source
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(2))
        self.states: list[Any] = []
        self.given: list[Any] = []
        self.parts: list[Any] = []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        loader = DataLoader(self.dataset, batch_size, sampler=sampler(self.dataset))
        return loader if self.source == "indices" else list(loader)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.parts.append(self.micro_batch.samples)
        self.passes += 1
        self.assigned = self.assigned + torch.rand(2)
        self.log("rows", len(batch[0]))
        outputs = self.net(torch.dropout(batch[0], 0.1, True))
        return {"loss": torch.nn.functional.cross_entropy(outputs, batch[1]), "rows": outputs, "text": ["x"]}

    def state(self) -> Any:
        return torch.get_rng_state().tolist(), self.passes.item(), self.assigned.tolist()

    def on_end_train_step(self, global_step: int, outputs: Any) -> None:
        self.states.append(self.state())
        self.given.append([list(outputs["loss"].shape), list(outputs["rows"].shape), len(outputs["text"])])


def last_step(samples: int, source: str, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Watched(samples, source)
    values = {"train_batch_size": 6, "epochs": 1, "log_every": 1, "backend": "ddp", **changes}
    trainer = ts.Trainer(module, arguments("unused", **values))
    trainer.train()
    before, after = module.states[-2:]
    return {
        "drew": before[0] != after[0],
        "wrote": before[2] != after[2],
        "passes": after[1],
        "given": module.given[-1],
        "parts": [None if part is None else len(part) for part in module.parts],
        "logged": [record.step for record in trainer.history.records("rows")],
        "weights": module.net.state_dict()["0.weight"].tolist() if "0.weight" in module.net.state_dict() else [],
    }
