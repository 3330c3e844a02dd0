"""Tensor subclasses that checkpoints may hold, and the parts of such a tensor.

A checkpoint names the class of a value. The name is looked up here; nothing that a file names is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any, TypeVar

from torch import Tensor, nn

from trainstack._deferred import DeferredTensor, whole
from trainstack.errors import ConfigurationError

_AO = "torchao.quantization"
_KNOWN = {
    "torchao.OptimState4bit": "torchao.optim.subclass_4bit",
    "torchao.OptimState8bit": "torchao.optim.subclass_8bit",
    "torchao.OptimStateFp8": "torchao.optim.subclass_fp8",
    "torchao.Float8Tensor": _AO,
    "torchao.Int8Tensor": _AO,
    "torchao.IntxUnpackedToInt8Tensor": _AO,
    "torchao.NF4Tensor": f"{_AO}.quantize_.workflows.nf4.nf4_tensor",
    "torchao.SubclassTensorArgs": f"{_AO}.quantize_.workflows.nf4.nf4_tensor",
    "torchao.KernelPreference": f"{_AO}.quantize_.common",
    "torchao.QuantizeTensorToInt8Kwargs": f"{_AO}.quantize_.workflows.int8.int8_tensor",
    "torchao.QuantizeTensorToFloat8Kwargs": f"{_AO}.quantize_.workflows.float8.float8_tensor",
    "torchao.MappingType": _AO,
    "torchao.PerRow": _AO,
    "torchao.PerTensor": _AO,
}
"""The modules of classes that are known without registration. They are imported where a checkpoint has one of them."""

_registered: dict[str, type] = {}
Class = TypeVar("Class", bound=type)


def register_tensor_class(cls: Class, name: str | None = None) -> Class:
    """Let checkpoints hold tensors of the subclass `cls`, as their inner tensors and attributes. Also a decorator.

    Register the class before a checkpoint is written or read. Attributes of a tensor may be values that a checkpoint
    holds, enums and dataclasses; register the classes of the latter two likewise.

    Args:
        cls: a subclass of `torch.Tensor` with `__tensor_flatten__` and `__tensor_unflatten__`, an enum or a dataclass.
        name: names the class in checkpoints. Keep it when the class moves. By default the module and the class.

    Returns:
        `cls`.

    Raises:
        ConfigurationError: `cls` is of another kind, or the name is that of another class.
    """
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    if not (_is_wrapper(cls) or issubclass(cls, Enum) or dataclasses.is_dataclass(cls)):
        raise ConfigurationError(
            f"register_tensor_class({cls.__name__}): the class is no subclass of torch.Tensor with __tensor_flatten__ "
            "and __tensor_unflatten__, no enum and no dataclass. Return plain tensors from get_state() instead."
        )
    if name in _KNOWN or _registered.get(name, cls) is not cls:
        raise ConfigurationError(f"register_tensor_class: {name!r} names another class. Write another name=.")
    _registered[name] = cls
    return cls


def _is_wrapper(cls: type) -> bool:
    return issubclass(cls, Tensor) and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def registered_name(cls: type) -> str | None:
    """The name under which checkpoints may hold values of `cls`; None if there is none."""
    known = f"torchao.{cls.__qualname__}"
    if cls.__module__.startswith("torchao.") and known in _KNOWN and registered_class(known) is cls:
        return known
    return next((name for name, one in _registered.items() if one is cls), None)


def registered_class(name: str) -> type:
    """The class that `register_tensor_class` was given under `name`.

    Raises:
        ConfigurationError: there is none, or its package cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    if name not in _KNOWN:
        raise ConfigurationError(
            f"the checkpoint holds a tensor of the class {name!r}. Import the module that defines the class, and call "
            "trainstack.register_tensor_class(cls) before the checkpoint is read."
        )
    try:
        found: type = getattr(import_module(_KNOWN[name]), name.rpartition(".")[2])
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the checkpoint holds a {name}, and {_KNOWN[name]} has no such class here ({error}). Install the version "
            "of torchao that the checkpoint was written with."
        ) from error
    return found


def inner_tensors(value: Any) -> tuple[dict[str, Tensor], Any] | None:
    """The tensors inside of a tensor subclass by their names, and its attributes; None for other values.

    A `DTensor` has one inside, the part of this process. Other classes of torch, such as nested tensors, answer to all
    operations themselves.
    """
    cls = type(value)
    if cls is Tensor or not isinstance(value, Tensor) or not _is_wrapper(cls):
        return None
    if cls.__module__.startswith("torch.") and not is_sharded(value):
        return None
    if is_sharded(value):
        return {"local": value.detach().to_local()}, (value.device_mesh, value.placements)  # type: ignore[attr-defined]
    names, attributes = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names}, attributes


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or a buffer of `module` is on the meta device, where it has no values."""
    return any(one.is_meta for one in module.parameters()) or any(one.is_meta for one in module.buffers())


def is_sharded(value: Any) -> bool:
    """Whether `value` is a `DTensor`, of which each process holds a part or a copy."""
    return type(value).__module__.startswith("torch.distributed.tensor") and isinstance(value, Tensor)


def class_of(module: nn.Module) -> type:
    """The class that `module` was made of; `fully_shard` makes another one of it, called FSDP..., with its methods."""
    classes = type(module).__mro__
    return next(one for one in classes if not any(base.__name__ == "FSDPModule" for base in one.__mro__))


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """The part of this process of a whole `tensor`, divided as the sharded tensor `like` is; no process waits.

    Of a `DeferredTensor` that is divided by rows, only the rows of this process are read.
    """
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    if (
        isinstance(tensor, DeferredTensor)
        and mesh.ndim == 1
        and type(placements[0]) is Shard
        and placements == (Shard(0),)
    ):
        count = tensor.shape[0]
        step = -(-count // mesh.size())  # torch divides as torch.chunk does
        first = min(count, mesh.get_local_rank() * step)
        local = tensor.rows(first, min(count, first + step)).to(like.device)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tuple(like.stride())
        )
    moved = whole(tensor).detach().to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that have the memory of `tensor`: those inside of a tensor subclass, or `tensor` itself."""
    found = inner_tensors(tensor)
    if found is None:
        yield tensor
    else:
        for inner in found[0].values():
            yield from plain_parts(inner)


def map_inner(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(tensor)`; of a tensor subclass, the same subclass with `function` of each inner tensor."""
    found = inner_tensors(tensor)
    if found is None:
        return function(tensor)
    inner = {name: map_inner(one, function) for name, one in found[0].items()}
    return join_inner(type(tensor), inner, found[1], tensor)


def join_inner(cls: Any, inner: dict[str, Tensor], attributes: Any, like: Any) -> Tensor:
    """A tensor of the subclass `cls` with these parts; `like` has its `size` and `stride`."""
    if is_sharded(like):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(inner["local"], *attributes, run_check=False, shape=like.size(), stride=like.stride())
    made: Tensor = cls.__tensor_unflatten__(inner, attributes, like.size(), like.stride())
    return made
