"""apex's own code over several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.workers import RANK


def apex(wheel: str, level: str, backend: str) -> dict[str, Any]:
    """apex's own code, under the shim; the gradient of the third step overflows on one process."""
    from tests.helpers import apex_shim

    apex_shim.install(Path(wheel))

    class Overflows(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            outputs = self.net(batch[0])
            if global_step == 3 and RANK == 0 and level != "O0":  # which has no scaler to see it
                outputs.register_hook(lambda gradient: gradient * float("inf"))
            return torch.nn.functional.cross_entropy(outputs.float(), batch[1])

    module = Overflows(numbers(64), optimizer=torch.optim.SGD, scheduler=True)
    options = {"amp_apex": {"max_loss_scale": 2.0**15}}
    made: dict[str, Any] = {"backend": backend, "amp_level_apex": level, "backend_options": options}
    trainer = ts.Trainer(module, arguments("unused", gpu_batch_size_limit=2, **made))
    trainer.train()
    return {"weights": weights(module).tolist(), "skipped": trainer.state.skipped_steps}
