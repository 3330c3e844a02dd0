"""The run whose checkpoints are kept as fixtures: it is interrupted by one version of the library, resumed by another.

`python -m tests.helpers.old_checkpoints FOLDER` writes a fixture for each legal backend string that runs on a CPU; set
`RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29731` for those of several processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments

FOLDER = Path(__file__).parent.parent / "contract" / "checkpoints"
STOP_AT = 4
"""Within the first of two epochs of six steps."""


def run(spec: str, directory: Path, *, stop_at: int | None = None, **changes: Any) -> ts.Trainer:
    """Train a model with dropout, augmentation, a scheduler and validation, so that every kind of state is saved."""
    module = Classifier(Noisy(), dropout=0.3, optimizer=torch.optim.AdamW, lr=0.01, scheduler=True, validate=True)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=STOP_AT)
    sizes: dict[str, Any] = {"epochs": 2, "train_batch_size": 8, "gpu_batch_size_limit": 4}
    trainer = ts.Trainer(module, arguments(directory, backend=spec, checkpointer_args=saving, **sizes, **changes))

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def stop(trainer: ts.Trainer) -> None:
        if trainer.global_steps_finished == stop_at:
            trainer.request_stop("the checkpoint is written")

    trainer.train()
    return trainer


def expected(spec: str) -> dict[str, Tensor]:
    """The weights at the end of the same run without the interruption."""
    return load_file(FOLDER / spec / "expected.safetensors")


def write(folder: Path) -> None:
    """Write the fixtures into `folder`."""
    for spec in ts.legal_specs():
        if spec.endswith("amp-apex"):
            continue
        torch.manual_seed(5)
        unbroken = run(spec, folder / "unbroken" / spec)
        torch.manual_seed(5)
        run(spec, folder / spec, stop_at=STOP_AT)
        save_file(unbroken.module.state_dict(), folder / spec / "expected.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
