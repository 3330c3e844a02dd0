"""`describe_start`: the settings that determine the numbers of a run, as texts by name, for resumes and comparisons."""

from __future__ import annotations

import dataclasses
import inspect
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from trainstack._tensor_classes import class_of
from trainstack.backends import World
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.changes import Description
from trainstack.trainer.core.effects import is_compared
from trainstack.trainer.core.fingerprints import describe, flatten, hash_code, hash_text, shorten
from trainstack.trainer.data.step_batches import describe_order
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.torch_settings import cpu_settings, precision_in_force

_PACKAGES = ("trainstack", "numpy", "opacus")
_OWN = ("torch", "trainstack", "builtins", "typing", "abc")
"""Packages whose code is identified by their versions."""


def describe_start(context: RunContext, data: TrainingData, code: Mapping[str, str] | None = None) -> Description:
    """Describe the settings that determine the numbers of this process's part of a run, as sections of texts by name.

    The description does not depend on records of a private run: it has no length and no digest of its data.

    Args:
        context: context of the run.
        data: training data of the run.
        code: result of `describe_code` at the start of the run, which does not change; None to compute it.
    """
    return {
        "arguments": describe_arguments(context.args, context.stack.spec),
        "environment": describe_environment(context.world, context.args),
        "data": describe_data(data, private=context.stack.is_private),
        "code": dict(describe_code(context) if code is None else code),
    }


def describe_arguments(args: TrainerArguments, spec: str) -> dict[str, str]:
    """Return the arguments that are compared, nested ones with dotted names; `spec` is the resolved backend string."""
    items = dict(flatten("backend", spec))
    for field in dataclasses.fields(args):
        if field.name not in ("backend", "float32_matmul_precision") and is_compared(f"arguments.{field.name}"):
            items |= flatten(field.name, getattr(args, field.name))
    return items


# --- environment


def describe_environment(world: World, args: TrainerArguments) -> dict[str, str]:
    """Return versions, the kind of machine and device, and torch's settings. Nothing identifies machine or user."""
    device = world.device
    items = {
        **package_versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "world size": str(world.size),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": precision_in_force(args.float32_matmul_precision),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
    }
    if device.type == "cpu":
        items |= {f"cpu {name}": str(value) for name, value in cpu_settings().items()}
    if device.type == "cuda":
        items |= {"accelerator": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        items |= {"hip": str(torch.version.hip), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    return items


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute numbers."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return found | {package: text for package in _PACKAGES if (text := _version_of(package)) is not None}


@cache  # installed versions do not change, and each lookup takes about 1 ms
def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def merge_environments(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Merge the environments of all ranks: one text if they agree, otherwise the texts of all ranks."""
    names = dict.fromkeys(name for one in ranks for name in one)
    texts = {name: [one.get(name, "-") for one in ranks] for name in names}
    return {name: own[0] if own.count(own[0]) == len(own) else ", ".join(own) for name, own in texts.items()}


# --- data


def describe_data(data: TrainingData, *, private: bool) -> dict[str, str]:
    """Return classes, length, order and code of the current epoch's training data; no length if `private`."""
    loader = data.loader
    dataset = getattr(loader, "dataset", None)
    plan = data.plan
    items = {"global batch": str(plan.global_batch), "micro-batch": str(plan.micro_batch)}
    items |= {"loader": type(loader).__qualname__, "data set": type(dataset).__qualname__}
    if data.training_set.length is not None:
        items |= {} if private else {"length of the data set": str(data.training_set.length)}
        items |= {"drop_last": str(loader.drop_last), "sampler": type(loader.sampler).__qualname__}
        items["order"] = describe_order(loader)
    held = {**getattr(dataset, "__dict__", {}), "collate_fn": getattr(loader, "collate_fn", None)}
    code = [*_methods(type(dataset), private), *_functions(held, private)]
    return items | ({"code": hash_text(repr(code))} if code else {})


def describe_optimizers(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Return the classes of optimizers, and the current options of their parameter groups."""
    items = dict[str, str]()
    for number, optimizer in enumerate(optimizers):
        items[f"{number}.class"] = type(optimizer).__qualname__
        groups = optimizer.param_groups
        for position, group in enumerate(groups):
            prefix = f"{number}.groups.{position}" if len(groups) > 1 else str(number)
            names = sorted(set(group) - {"params", "param_names"}, key=str)
            items |= {f"{prefix}.{name}": shorten(describe(group[name])) for name in names}
    return items


# --- code


def describe_code(context: RunContext) -> dict[str, str]:
    """Return digests of the byte code of the user's classes and functions; comments and line numbers do not count.

    Each method of the module and of the callbacks has a digest. The class of a part of the module has one for all of
    its methods. Functions that these call are not included. In a private run, values that functions hold are omitted,
    because they may be records.
    """
    private, module = context.stack.is_private, context.module
    items = dict[str, str]()
    for one in (module, *context.events.callbacks.values()):
        items |= _methods(class_of(one) if one is module else type(one), private)
    for cls in dict.fromkeys(map(class_of, list(module.modules())[1:])):
        methods = list(_methods(cls, private))
        items |= {cls.__qualname__: hash_text(repr(methods))} if methods else {}
    given = {"train_step": context.train_step, "val_step": context.val_step}
    return items | {f"Trainer({name})": text for name, text in _functions(given, private)}


def _methods(cls: type, private: bool) -> Iterator[tuple[str, str]]:
    for part in cls.__mro__:
        if part.__module__.partition(".")[0] not in _OWN:
            yield from ((f"{part.__qualname__}.{name}", text) for name, text in _functions(vars(part), private))


def _functions(members: Mapping[str, Any], private: bool) -> Iterator[tuple[str, str]]:
    """Yield digests of the functions in `members`; methods, properties and wrapped functions are unwrapped."""
    for name, member in members.items():
        parts = [hash_code(one.__code__) if private else describe(one) for one in _inner(member)]
        if parts:
            yield name, hash_text(repr(parts))


def _inner(member: Any) -> list[FunctionType]:
    if isinstance(member, property):
        return [one for part in (member.fget, member.fset) if part is not None for one in _inner(part)]
    if isinstance(member, partial):
        member = member.func
    if isinstance(member, staticmethod | classmethod | MethodType):
        member = member.__func__
    found = inspect.unwrap(member) if isinstance(member, FunctionType) else None
    is_own = found is None or (found.__module__ or "").partition(".")[0] in _OWN
    return [found] if isinstance(found, FunctionType) and not is_own else []
