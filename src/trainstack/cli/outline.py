"""`trainstack checkpoints show`: what a checkpoint holds, read off its manifest, its JSON and its tensors' headers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.difference import children, describe
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.reading import read_states
from trainstack.cli.printing import print_json, print_line, readable_size

_LONG_LIST = 8


def show(args: argparse.Namespace) -> int:
    """Print the manifest and an outline of the states. Tensors are not read."""
    content, states = read_states(args.path, tensors=False)
    facts = _facts(content)
    if args.json:
        print_json({**facts, "states": {name: _as_json(state) for name, state in states.items()}})
        return 0
    for name, value in facts.items():
        if isinstance(value, Mapping):
            print_line(name)
            for key, item in value.items():
                print_line(f"  {key:<22} {_file(item) if name == 'files' else item}")
        else:
            print_line(f"{name:<24} {value}")
    for name, state in states.items():
        print_line()
        print_line(f"{name}: {summary(state)}")
        for line in lines(state, 1):
            print_line(line)
    return 0


def _facts(content: Manifest) -> dict[str, Any]:
    plain = StateDecoder({})
    plan, metadata = plain.decode(content.plan) or {}, plain.decode(content.metadata) or {}
    processes = {"processes": plan["world_size"]} if "world_size" in plan else {}
    return {
        "name": content.name,
        "kind": content.kind,
        "created": content.created,
        "global step": content.global_step,
        **{key: value for key, value in metadata.items() if not isinstance(value, Mapping)},
        **processes,
        **{key: value for key, value in metadata.items() if isinstance(value, Mapping) and value},
        "plan": plan,
        "versions": content.versions,
        "files": {name: asdict(record) for name, record in content.files.items()},
    }


def _file(record: Mapping[str, Any]) -> str:
    return f"{readable_size(record['size']):>9}  xxh3-128 {record['xxh3_128']}"


def summary(state: Any) -> str:
    """How many tensors a state holds and what they take."""
    if state is None:
        return "nothing"
    tensors = list(_tensors(state))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return f"{len(tensors)} tensors, {sum(t.numel() for t in tensors):,} elements, {readable_size(size)}"


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    else:
        for _, value in children(state) or ():
            yield from _tensors(value)


def lines(value: Any, depth: int) -> Iterator[str]:
    """One line for each leaf of a state; lists of numbers and long lists are summed up."""
    for key, item in children(value) or ():
        name = f"{'  ' * depth}{key if isinstance(key, str) else f'[{key}]'}"
        inner = children(item)
        if inner is None or not inner or _is_plain_list(item):
            yield f"{name:<40} {describe(item)}"
            continue
        yield name
        shown = item if isinstance(item, Mapping) or len(inner) <= _LONG_LIST else [first for _, first in inner[:2]]
        yield from lines(shown, depth + 1)
        if len(shown) < len(inner):
            yield f"{'  ' * (depth + 1)}... and {len(inner) - len(shown)} more"


def _is_plain_list(value: Any) -> bool:
    inner = children(value) or []
    if isinstance(value, Mapping):
        return False
    return len(inner) > _LONG_LIST and not any(children(item) or isinstance(item, torch.Tensor) for _, item in inner)


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    inner = children(value)
    if inner is None:
        return value
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in inner}
    return [_as_json(item) for _, item in inner]
