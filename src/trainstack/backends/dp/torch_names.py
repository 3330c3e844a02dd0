"""Names of torch that private training needs and that torch may rename."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

pytree: Any = getattr(torch.utils, "_pytree", None)
"""Nested batches and outputs as flat lists; `torch.func.vmap` treats the same containers the same way. torch 2.13.0."""
if pytree is None:
    raise ImportError(
        f"private training uses torch.utils._pytree, which torch {torch.__version__} does not have. Install torch "
        "2.13.0."
    )

BATCH_NORMS: Any = getattr(
    nn.modules.batchnorm, "_BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)
"""For `isinstance`: layers of other libraries derive from the private base class. torch 2.13.0."""

INSTANCE_NORMS: Any = getattr(
    nn.modules.instancenorm, "_InstanceNorm", (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
)
"""For `isinstance`. torch 2.13.0."""
