"""`OperatorWatch` finds the operators of torch that may give other bits in each run, on this device or on CUDA."""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from trainstack._dispatch import dispatch_to
from trainstack.verifying.determinism.user_sources import SourceWatch, describe_place


class Operator(NamedTuple):
    """An operator that a step has called.

    Attributes:
        name: in torch's namespace `aten`.
        place: file, line and function of the user's code with the first call; "" in a backward pass.
        where: the devices on which it is not deterministic.
        setting: the setting that makes it deterministic, or a replacement.
    """

    name: str
    place: str
    where: str
    setting: str


SWITCH = "TrainerArguments(deterministic=True)"
_NO_WAY = "torch has no deterministic version; deterministic=True raises an error there"

_SWITCHED = {
    "convolution_backward", "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
    "index_put", "index_put_", "_index_put_impl_", "scatter_add", "scatter_add_", "index_add", "index_add_",
    "index_copy", "index_copy_", "scatter", "scatter_", "scatter_reduce", "scatter_reduce_",
    "max_pool3d_with_indices_backward", "_efficient_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention_backward",
}  # fmt: skip
"""Names in `aten` that have a deterministic version on CUDA, which the setting selects. From the documentation of
`torch.use_deterministic_algorithms` in torch 2.13.0; the backward passes of attention from their kernels."""

_WITHOUT = {
    "avg_pool3d_backward": "an AvgPool3d with a convolution of equal weights",
    "_adaptive_avg_pool2d_backward": "mean((-2, -1)) for an output of size 1, or AvgPool2d",
    "_adaptive_avg_pool3d_backward": "mean((-3, -2, -1)) for an output of size 1",
    "adaptive_max_pool2d_backward": "amax((-2, -1)) for an output of size 1, or MaxPool2d",
    "fractional_max_pool2d_backward": "MaxPool2d",
    "fractional_max_pool3d_backward": "MaxPool3d",
    "max_unpool2d": "", "max_unpool3d": "",
    "upsample_linear1d_backward": 'mode="nearest"',
    "upsample_bilinear2d_backward": 'mode="nearest"',
    "upsample_bicubic2d_backward": 'mode="nearest"',
    "upsample_trilinear3d_backward": 'mode="nearest"',
    "reflection_pad1d_backward": "ReplicationPad1d",
    "reflection_pad2d_backward": "ReplicationPad2d",
    "reflection_pad3d_backward": "ReplicationPad3d",
    "nll_loss2d_forward": "flatten the positions, so that nll_loss gets two dimensions",
    "_ctc_loss_backward": "",
    "_embedding_bag_dense_backward": 'mode="sum" or mode="mean"',
    "put_": "index_put_",
    "histc": "bucketize on the host",
    "bincount": "a sum of one_hot",
    "median": "sort, and the element in the middle",
    "grid_sampler_2d_backward": "", "grid_sampler_3d_backward": "",
    "cumsum": "",
}  # fmt: skip
"""Names without a deterministic version on CUDA, with a replacement if there is one (torch 2.13.0)."""

_MESSAGE = re.compile(r"(\S+) does not have a deterministic implementation")


class OperatorWatch:
    """A block that observes the operators of forward and backward passes and of optimizers.

    torch warns of operators that are not deterministic on the current device. Those that are not on CUDA are known by
    name.

    Attributes:
        found: by name.
    """

    def __init__(self) -> None:
        self.found: dict[str, Operator] = {}
        self._frames, self._stack = SourceWatch(), ExitStack()
        self._warned: list[warnings.WarningMessage] = []

    def __enter__(self) -> OperatorWatch:
        self._warned = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        self._stack.enter_context(dispatch_to(self._see))
        return self

    def __exit__(self, *given: Any) -> None:
        self._stack.close()
        for one in self._warned:
            match = _MESSAGE.search(str(one.message))
            if match is not None:
                name = match[1].removesuffix("_out").removesuffix("_cuda").removesuffix("_cpu")
                known = self.found.get(name)
                place = "" if known is None else known.place
                self.found[name] = Operator(name, place, "this device", _setting(name))

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if (name in _SWITCHED or name in _WITHOUT) and name not in self.found and _may_differ(name, args, kwargs):
            frame = self._frames.find_user_frame(sys._getframe(1))
            place = "" if frame is None else describe_place(frame)
            self.found[name] = Operator(name, place, "CUDA", _setting(name))
        return func(*args, **kwargs)


def _may_differ(name: str, args: Any, kwargs: Any) -> bool:
    """Whether these arguments are among those for which the operator is not deterministic on CUDA."""
    if name in ("cumsum", "histc"):
        return bool(args[0].is_floating_point() or args[0].is_complex())
    if name == "bincount":
        return len(args) > 1 or kwargs.get("weights") is not None
    if name == "_embedding_bag_dense_backward":
        return len(args) > 7 and args[7] == 2  # mode "max"
    if name in ("scatter", "scatter_"):
        return len(args) > 3 and isinstance(args[3], torch.Tensor)
    return True


def _setting(name: str) -> str:
    if name in _WITHOUT:
        instead = _WITHOUT[name]
        return f"{_NO_WAY}. Write {instead}" if instead else f"{_NO_WAY}"
    return SWITCH
