"""`torchvision::nms` in Python, if torchvision's compiled operators do not load with the installed torch.

`python -m tools.clients` puts this folder into PYTHONPATH only in such an environment, for example with torchvision's
wheel for CUDA and torch for the CPU. Python imports a `sitecustomize` when it starts, also in processes that a script
starts. torchvision cannot be imported without `nms`. It computes `roi_align` in Python if it lacks the operator; the
other operators are missing, and their functions raise an error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

kept = []  # operators exist as long as their library


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that do not overlap a kept box with a higher score by more than the threshold."""
    import torch

    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    corner = torch.maximum(boxes[:, None, :2], boxes[:, :2])
    sides = (torch.minimum(boxes[:, None, 2:], boxes[:, 2:]) - corner).clamp(min=0)
    shared = sides.prod(2)
    overlaps = (shared / (areas[:, None] + areas - shared) > iou_threshold).tolist()
    stay: list[int] = []
    for box, row in enumerate(overlaps):
        if not any(row[other] for other in stay):
            stay.append(box)
    return order[torch.tensor(stay, dtype=torch.int64)]


class Finder(MetaPathFinder):
    """Defines the operator between the import of `torchvision.extension` and that of the module that needs it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Return None, so that the usual finders continue."""
        if name == "torchvision._meta_registrations" and not kept:
            define(sys.modules["torchvision.extension"])


def define(extension: ModuleType) -> None:
    """Define the operator unless the compiled ones exist."""
    import torch

    if extension._has_ops():
        return
    library = torch.library.Library("torchvision", "DEF")
    kept.append(library)
    for name in ("nms", "qnms"):  # torchvision registers a shape function for both, so both have to exist
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CPU")
    extension._assert_has_ops = lambda: None  # would refuse each call; the operators that are absent still raise


sys.meta_path.insert(0, Finder())
