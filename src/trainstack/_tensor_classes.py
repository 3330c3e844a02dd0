"""Tensor subclasses that checkpoints may contain, and the inner tensors of such a tensor.

A checkpoint stores the name of the class of a value. The name is looked up in a table; for security, no module is
imported because a file names it.
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
"""The modules of classes that need no registration. A module is imported when a checkpoint contains its class."""

_registered: dict[str, type] = {}
Class = TypeVar("Class", bound=type)


def register_tensor_class(cls: Class, name: str | None = None) -> Class:
    """Allow tensors of the subclass `cls` in checkpoints. Usable as a decorator.

    A checkpoint stores the inner tensors and the attributes of such a tensor. Register the class before you write or
    read a checkpoint. An attribute can be any value that a checkpoint can store, an enum or a dataclass; register the
    classes of enums and dataclasses, too.

    Args:
        cls: a subclass of `torch.Tensor` with `__tensor_flatten__` and `__tensor_unflatten__`, an enum or a dataclass.
        name: the name of the class in checkpoints, by default its module and qualified name. Keep the name when you
            move or rename the class, so that old checkpoints can be read.

    Returns:
        `cls`.

    Raises:
        ConfigurationError: `cls` is not one of these classes, or another class has this name.
    """
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    if not (_is_wrapper(cls) or issubclass(cls, Enum) or dataclasses.is_dataclass(cls)):
        raise ConfigurationError(
            f"register_tensor_class({cls.__name__}): the class must be a subclass of torch.Tensor with "
            "__tensor_flatten__ and __tensor_unflatten__, an enum or a dataclass. Return plain tensors from "
            "get_state() instead."
        )
    if name in _KNOWN or _registered.get(name, cls) is not cls:
        raise ConfigurationError(f"register_tensor_class: {name!r} names another class. Write another name=.")
    _registered[name] = cls
    return cls


def _is_wrapper(cls: type) -> bool:
    return issubclass(cls, Tensor) and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def registered_name(cls: type) -> str | None:
    """The name of `cls` in checkpoints; None if checkpoints cannot store its values."""
    known = f"torchao.{cls.__qualname__}"
    if cls.__module__.startswith("torchao.") and known in _KNOWN and registered_class(known) is cls:
        return known
    return next((name for name, one in _registered.items() if one is cls), None)


def registered_class(name: str) -> type:
    """The class that is registered under `name`.

    Raises:
        ConfigurationError: no class is registered under `name`, or its package cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    if name not in _KNOWN:
        raise ConfigurationError(
            f"the checkpoint contains a tensor of the class {name!r}. Import the module that defines the class, and "
            "call trainstack.register_tensor_class(cls) before the checkpoint is read."
        )
    try:
        found: type = getattr(import_module(_KNOWN[name]), name.rpartition(".")[2])
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the checkpoint contains a {name}, but the installed {_KNOWN[name]} has no such class ({error}). Install "
            "the version of torchao that the checkpoint was written with."
        ) from error
    return found


def inner_tensors(value: Any) -> tuple[dict[str, Tensor], Any] | None:
    """The inner tensors of a tensor subclass by name, and its attributes; None for other values.

    A `DTensor` has one inner tensor, the local shard. For other subclasses that torch defines, such as nested tensors,
    the result is None.
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
    """Whether `value` is a `DTensor`; each process has a shard or a replica of it."""
    return type(value).__module__.startswith("torch.distributed.tensor") and isinstance(value, Tensor)


def class_of(module: nn.Module) -> type:
    """The class of `module` before `fully_shard`, which replaces it with a subclass with the prefix "FSDP"."""
    classes = type(module).__mro__
    return next(one for one in classes if not any(base.__name__ == "FSDPModule" for base in one.__mro__))


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard the full `tensor` in the same way as the sharded tensor `like`, without communication.

    If `tensor` is a `DeferredTensor` that is sharded by rows, only the rows of this process are read.
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
        step = -(-count // mesh.size())  # `Shard` splits as torch.chunk does: all chunks but the last have this size
        first = min(count, mesh.get_local_rank() * step)
        local = tensor.rows(first, min(count, first + step)).to(like.device)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tuple(like.stride())
        )
    moved = whole(tensor).detach().to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that own the memory of `tensor`: the inner tensors of a tensor subclass, or `tensor` itself."""
    found = inner_tensors(tensor)
    if found is None:
        yield tensor
    else:
        for inner in found[0].values():
            yield from plain_parts(inner)


def map_inner(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(tensor)`; for a tensor subclass, the same subclass with `function` applied to each inner tensor."""
    found = inner_tensors(tensor)
    if found is None:
        return function(tensor)
    inner = {name: map_inner(one, function) for name, one in found[0].items()}
    return join_inner(type(tensor), inner, found[1], tensor)


def join_inner(cls: Any, inner: dict[str, Tensor], attributes: Any, like: Any) -> Tensor:
    """A tensor of the subclass `cls` with these inner tensors, and with the `size` and `stride` of `like`."""
    if is_sharded(like):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(inner["local"], *attributes, run_check=False, shape=like.size(), stride=like.stride())
    made: Tensor = cls.__tensor_unflatten__(inner, attributes, like.size(), like.stride())
    return made
