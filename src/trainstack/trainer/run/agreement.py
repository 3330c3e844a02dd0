"""Compare the items that must be equal on all ranks when they train."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainstack._tensor_classes import is_sharded
from trainstack.backends import Workload, World
from trainstack.backends.processes.packing import broadcast_coalesced
from trainstack.checkpointing import DefaultCheckpointer
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.agreement import describe_ranks, find_difference, gather_differences, refuse_difference
from trainstack.trainer.core.fingerprints import checksums, describe, describe_object, flatten, hash_text, shorten
from trainstack.trainer.data.fixed_samples import Samples, random_places
from trainstack.trainer.data.step_batches import describe_order
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.events.hooks import overridden
from trainstack.trainer.module_interface import CallbackInterface
from trainstack.trainer.schedulers.stepping import Schedules

MAY_DIFFER: Mapping[str, str] = {
    "device": "each rank has its own",
    "use_gpu": "part of the device",
    "output_dir": "rank 0 writes",
    "overwrite": "rank 0 writes",
    "checkpointer_args.save_dir": "rank 0 writes",
    "checkpointer_args.sign_key": "rank 0 signs",
    "writers": "rank 0 writes",
    "writer_args": "rank 0 writes",
    "report": "rank 0 writes",
    "progress": "rank 0 shows it",
    "disable_tqdm": "rank 0 shows it",
    "log_level": "each rank logs for itself",
    "fast_paths": "they give the same bits",
    "stop_grace_s": "only a warning depends on it",
    "save_on_exception": "rank 0 writes, and asks no other rank",
    "distributed_training_args.local_rank": "each rank has its own",
    "distributed_training_args.global_rank": "each rank has its own",
    "distributed_training_args.local_world_size": "hosts may have different numbers of processes",
    "distributed_training_args.master_addr": "rank 0 may use another name for its host",
}
"""Arguments that may differ between ranks, each with the reason."""

Items = dict[str, str]
_OF_DATASET = " of the training dataset"
_LENGTH = f"the length{_OF_DATASET}"


def _arguments(context: RunContext) -> Iterator[tuple[str, str]]:
    yield "backend", context.stack.spec
    for field in dataclasses.fields(context.args):
        if field.name in MAY_DIFFER or field.name == "backend":  # "auto" and the string it resolves to are the same
            continue
        value = getattr(context.args, field.name)
        if field.name == "max_time" and value is not None:
            value = "a time"  # ranks may compute the time until a deadline, and stop together
        if field.name in ("resume", "init_weights_from") and isinstance(value, str | PathLike):
            value = Path(value).name  # each host may have its own copy; step, seed and weights are compared later
        for name, text in flatten(field.name, value):
            if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in MAY_DIFFER):
                yield name, text


def agree_on_setup(context: RunContext) -> None:
    """Compare arguments, versions, module and callbacks. Call this before any file is read and any layer prepares.

    Raises:
        ConfigurationError: something differs between ranks.
    """
    if context.world.size == 1:
        return
    module, checkpointer = context.module, context.checkpointer
    items = Items(_arguments(context))
    own = sys.modules[__name__.partition(".")[0]]
    items |= {"the version of trainstack": describe(getattr(own, "__version__", None))}
    items |= {"the version of torch": str(torch.__version__)}
    items |= {"the version of Python": ".".join(platform.python_version_tuple()[:2])}
    items |= {"torch's default dtype": str(torch.get_default_dtype())}
    items |= {"torch's float32 matmul precision": torch.get_float32_matmul_precision()}
    items |= {"the class of the module": type(module).__qualname__}
    items |= {"the class of the checkpointer": type(checkpointer).__qualname__}
    if not isinstance(checkpointer, DefaultCheckpointer):
        items["every_n_steps of the checkpointer"] = describe(checkpointer.every_n_steps)
        items["every_n_seconds of the checkpointer"] = describe(checkpointer.every_n_seconds)
    items |= {"the hooks of the module": ", ".join(_hooks(module)) or "none", "val_step": describe(context.val_step)}
    items |= {"train_step": describe(context.train_step)}
    items |= _callbacks(context)
    items |= _structure(module)
    refuse_difference(context.world.comm, items)


def _hooks(module: Any) -> Iterator[str]:
    """The names of the hooks that `module` defines.

    If only some ranks have a hook with a collective, these ranks wait for the others forever.
    """
    for name in dir(CallbackInterface):
        if name.startswith("on_") and overridden(module, name) is not None:
            yield name


def _callbacks(context: RunContext) -> Items:
    """Classes in their order, and the settings of the library's callbacks. Settings of users' may differ by rank."""
    callbacks = context.events.callbacks
    items = {
        "the callbacks": shorten(", ".join(type(callback).__qualname__ for callback in callbacks.values())) or "none"
    }
    for key, callback in callbacks.items():
        if type(callback).__module__.startswith("trainstack."):
            for name, value in vars(callback).items():
                if (value is None or isinstance(value, bool | int | float)) and "path" not in name:
                    items[f"{name.lstrip('_')} of callback {key}"] = repr(value)
    return items


def _structure(module: nn.Module) -> Items:
    """Names, shapes, dtypes and `requires_grad` of parameters and buffers, ties, and settings of torch's layers."""
    owners = dict[int, str]()
    items = Items()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        tied = "" if first == name else f", the same as {first}"
        items[f"parameter {name}"] = f"{_layout(parameter)}, requires_grad={parameter.requires_grad}{tied}"
    items |= {f"buffer {name}": _layout(buffer) for name, buffer in module.named_buffers(remove_duplicate=False)}
    for name, part in module.named_modules():
        own = part.extra_repr() if type(part).__module__.startswith("torch.nn.") else ""
        items[f"part {name or 'module'}"] = f"{type(part).__qualname__}({own}), training={part.training}"
    return {name: shorten(text) for name, text in items.items()}


def _layout(tensor: Tensor) -> str:
    shape = "no shape" if is_lazy(tensor) else str(tuple(tensor.shape))
    return f"{shape}, {str(tensor.dtype).removeprefix('torch.')}{' on the meta device' if tensor.is_meta else ''}"


def share_initial_values(context: RunContext) -> int:
    """Broadcast the initial parameters and buffers of rank 0 if they differ, with a warning.

    Returns:
        the number of tensors that differed on any rank.
    """
    module, world = context.module, context.world
    names = differing_tensors(module, world)
    if not names:
        return 0
    tensors = _named_tensors(module)
    broadcast_coalesced(world, [tensors[name] for name in names])
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")  # three names show which part differs
    context.log.warning(
        f"{len(names)} of {len(tensors)} parameters and buffers had different initial values on the ranks: {shown}. "
        "All ranks start from the values of rank 0. To build the same module on each rank, call seed_everything(seed) "
        "with the same seed before."
    )
    return len(names)


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that must be equal on all ranks. Without sharded ones, whose layer has shared their values."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: t for name, t in named if not is_lazy(t) and not is_sharded(t)}


def differing_tensors(module: nn.Module, world: World) -> list[str]:
    """The names of parameters and buffers whose bits differ on any rank, the same list on all ranks."""
    if world.size == 1:
        return []
    named = _named_tensors(module)
    mine = dict(zip(named, map(str, checksums(named.values())), strict=True))
    return gather_differences(world.comm, mine)[1]


def agree_on_workload(context: RunContext, data: TrainingData, work: Workload) -> None:
    """Compare plan, data, optimizers and parameter values, before a layer wraps the module.

    Raises:
        ConfigurationError: something differs between ranks.
    """
    comm, private = context.world.comm, context.stack.is_private
    if comm.size == 1:
        return
    items = _data(data, private) | Items(flatten("plan", data.plan)) | _optimizers(work) | _values(work.module)
    items |= _samples(data.sample_hashes)
    found = find_difference(comm, items)
    if found is None:
        return
    doubtful = Items()
    if any(map(_is_of_sample, (found.name, *found.others))):
        items, doubtful = _without_random_samples(context, data, items)
    refuse_difference(comm, items, frozenset({_LENGTH} if private else ()))
    found = find_difference(comm, doubtful)
    if found is not None:
        context.log.warning(
            f"{found.name} {describe_ranks(found.texts)}. The data set changes when samples are fetched, so it may use "
            "its own random numbers. All ranks must train with the same data."
        )


def _samples(samples: Samples) -> Items:
    return {
        f"{place} of sample {index}{_OF_DATASET}".removeprefix(" of "): text
        for index, found in samples.items()
        for place, text in found.items()
    }


def _is_of_sample(name: str) -> bool:
    return "sample " in name and name.endswith(_OF_DATASET)


def _without_random_samples(context: RunContext, data: TrainingData, items: Items) -> tuple[Items, Items]:
    """Omit numbers that are not always the same on some rank, and samples that some rank cannot fetch.

    Returns:
        the items to compare, and the numbers that may be random because a fetch changes the data set of some rank.
    """
    random, is_unchanged = random_places(data.loader, context.state.seed)
    said = context.world.comm.gather([sorted(data.sample_hashes), sorted(_samples(random)), is_unchanged], "samples")
    known = set.intersection(*(set(indices) for indices, _, _ in said))
    unsure = {name for _, names, _ in said for name in names}
    compared = [name for name in _samples(data.sample_hashes) if name not in unsure and _index_of(name) in known]
    settings = {name: text for name, text in items.items() if not _is_of_sample(name)}
    numbers = {name: items[name] for name in compared}
    return (settings | numbers, {}) if all(same for _, _, same in said) else (settings, numbers)


def _index_of(name: str) -> str:
    return name.removesuffix(_OF_DATASET).rpartition(" ")[2]


def _data(data: TrainingData, private: bool) -> Items:
    loader = data.loader
    items = {"the class of the training loader": type(loader).__qualname__}
    dataset = getattr(loader, "dataset", None)
    items["the class of the training dataset"] = type(dataset).__qualname__
    if data.training_set.length is not None:
        length = str(data.training_set.length)
        items[_LENGTH] = hash_text(length) if private else length
        items["drop_last of the training loader"] = str(loader.drop_last)
        items["the sampler of the training loader"] = type(loader.sampler).__qualname__
        items["the order of the training data"] = describe_order(loader)
    return items


def _optimizers(work: Workload) -> Items:
    names = {id(parameter): name for name, parameter in work.module.named_parameters()}
    items = {"the number of optimizers": str(len(work.optimizers))}
    for number, optimizer in enumerate(work.optimizers):
        items[f"the class of optimizer {number}"] = type(optimizer).__qualname__
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {index}"
            held = ", ".join(names.get(id(parameter), "?") for parameter in group["params"])
            items[f"the parameters of {where}"] = shorten(held or "none")
            for key in sorted(set(group) - {"params", "param_names"}, key=str):
                items[f"{key} of {where}"] = shorten(describe(group[key]))
    return items


def _values(module: nn.Module) -> Items:
    named = {name: t for name, t in _named_tensors(module).items() if isinstance(t, nn.Parameter)}
    sums = checksums(named.values())
    # the mask shows a signed int64 as unsigned hexadecimal
    return {f"the checksum of {name!r}": f"{value & (2**64 - 1):x}" for name, value in zip(named, sums, strict=True)}


def agree_on_start(context: RunContext, data: TrainingData, work: Workload, schedules: Schedules) -> None:
    """Compare the items that may have changed when `train()` begins: arguments, plan, place in the run, settings.

    Raises:
        ConfigurationError: something differs between ranks.
    """
    if context.world.size == 1:
        return
    state = context.state
    items = Items(_arguments(context)) | Items(flatten("plan", data.plan))
    items |= {"the current epoch": str(state.epoch), "the finished global steps": str(state.global_step)}
    items |= {"the seed of the run": str(state.seed)} | _optimizers(work)
    for number, scheduler in enumerate(schedules.schedulers):
        items |= describe_object(f"scheduler {number}", scheduler)
    refuse_difference(context.world.comm, items)


def agree_on_values(context: RunContext) -> None:
    """Compare the parameters just before the first step of `train()`.

    Raises:
        ConfigurationError: a hook has changed the weights of some ranks.
    """
    if context.world.size > 1:
        refuse_difference(context.world.comm, _values(context.module))
