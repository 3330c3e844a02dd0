"""`load_streamed` loads initial weights into a module, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainstack._tensor_classes import is_sharded, shard_like
from trainstack.checkpointing.pretrained.matching import WarmStartReport, match_weights
from trainstack.checkpointing.weights import read_weights
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.shards import copy_values, has_shards
from trainstack.trainer.resume.own_states import has_memory_for, is_loaded_by_torch


def can_stream(module: nn.Module) -> bool:
    """Whether to use `load_streamed`: only code of torch loads the state of `module`, or `module` is sharded."""
    return has_shards(module) or is_loaded_by_torch(module)


def load_streamed(
    context: RunContext, on_rank_zero: Callable[[Callable[[], Any], str], Any], source: Path
) -> WarmStartReport:
    """`warm_start` with at most one tensor in memory in addition to the module. All processes call this.

    The main process maps the files and broadcasts one tensor at a time. Each process stores it, or its part of it.

    Raises:
        CheckpointMismatchError: no tensor fits, or not all fit and `init_weights_strict` is set.
        CheckpointNotFoundError, CheckpointDamagedError: the source cannot be read.
    """
    module, world = context.module, context.world
    own = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    given: dict[str, Tensor] = {}

    def match() -> dict[str, Any]:
        given.update(read_weights(source, mapped=True))
        strict, said = context.args.init_weights_strict, os.fspath(source)
        report, names = match_weights(module, own, given, said, strict=strict)
        kept = {key: given[name] for key, name in names.items()}
        given.clear()
        given.update(kept)
        dtypes = {key: str(one.dtype).removeprefix("torch.") for key, one in kept.items()}
        return {"dtypes": dtypes, "report": {name: getattr(report, name) for name in WarmStartReport.__slots__}}

    found = on_rank_zero(match, "reading the initial weights")
    taken: dict[str, Tensor] = {}
    for key, dtype in found["dtypes"].items():
        taken[key] = own[key]
        if world.is_main:
            values = given.pop(key).to(world.device)
        else:
            values = torch.empty(own[key].shape, dtype=getattr(torch, dtype), device=world.device)
        world.comm.broadcast_(values)
        if has_memory_for(own[key], values):
            copy_values(own[key], values)
        else:
            taken[key] = shard_like(values, own[key]) if is_sharded(own[key]) else values
        del values
    module.load_state_dict(taken, strict=False)
    return _report(found["report"])


def _report(fields: Mapping[str, Any]) -> WarmStartReport:
    made: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}
    return WarmStartReport(**made)
