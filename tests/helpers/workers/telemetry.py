"""Telemetry of a private run over several processes."""

from __future__ import annotations

from typing import Any

import trainstack as ts
from tests.helpers.modules import weights
from tests.helpers.private_runs import Rated, private, promise


def telemetry_of(directory: str, backend: str = "ddp-dp", **promised: Any) -> dict[str, Any]:
    """All recorded values of a run, and the weights that it reaches."""
    module = Rated()
    args = promise(telemetry={"loss": (0, 4), "accuracy": (0, 1)}, grad_mode="vmap", **promised)
    trainer = ts.Trainer(module, private(directory, args, backend=backend, log_every=2))
    trainer.train()
    return {"values": trainer.history.to_dict(), "weights": weights(module).tolist()}
