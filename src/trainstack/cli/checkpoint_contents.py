"""`trainstack checkpoints show | diff` prints the states of a checkpoint, and compares those of two."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainstack._files import is_address, remote_address
from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.checkpointing.difference import children, describe, differences
from trainstack.checkpointing.integrity.lineage import Lineage
from trainstack.checkpointing.integrity.signing import claimed_signer
from trainstack.checkpointing.manifest import Manifest, decode_plain
from trainstack.checkpointing.reading import read_states
from trainstack.checkpointing.verification import resolve_pointer
from trainstack.cli.printing import FAILED, print_json, print_line, readable_date, readable_size
from trainstack.step_log.checkpoint_heads import KEY as STEP_LOG_HEADS


def diff_checkpoints(args: argparse.Namespace) -> int:
    """Compare two checkpoints; 0 if all bits agree, else 1."""
    (one, states), (other, other_states) = read_states(located(args.one)), read_states(located(args.other))
    model_only = args.model or one.kind == "model" or other.kind == "model"
    if model_only:  # the module's state comes first in both kinds
        found = list(differences(_model(one, states), _model(other, other_states), "model"))
    else:
        found = list(differences({**states, **_facts(one)}, {**other_states, **_facts(other)}))
    if args.json:
        rows = [asdict(row) for row in found]
        print_json({"same": not found, "compared": "model" if model_only else "all", "differences": rows})
    else:
        for row in found:
            print_line(str(row))
        what = "the weights" if model_only else "all states, plans and versions"
        print_line(f"{len(found)} differences in {what}" if found else f"{what} agree in every bit")
    return FAILED if found else 0


def located(given: str) -> Path:
    """The checkpoint that a path, a pointer or an address names; that of an address is downloaded into the cache."""
    if not is_address(given):
        return resolve_pointer(Path(given))
    from trainstack.checkpointing.remote.fetching import fetch

    return fetch(remote_address("PATH", given))


def _model(content: Manifest, states: Mapping[str, Any]) -> dict[str, Any]:
    """The module's state, with the digests of the frozen weights that it leaves out."""
    left_out = (decode_plain(content.metadata) or {}).get(LEFT_OUT)
    return {**next(iter(states.values())), **({LEFT_OUT: left_out} if left_out else {})}


def _facts(content: Manifest) -> dict[str, Any]:
    plan, metadata = (decode_plain(tree) for tree in (content.plan, content.metadata))
    # The step log of a resumed run has other blocks than that of an uninterrupted one.
    facts = {name: value for name, value in (metadata or {}).items() if name != STEP_LOG_HEADS}
    return {"plan": plan, "metadata": facts, "versions": content.versions}


def show_checkpoint(args: argparse.Namespace) -> int:
    """Print the manifest and an outline of the states. Tensors are not read."""
    path = located(args.path)
    content, states = read_states(path, tensors=False)
    facts = _outline_facts(content, claimed_signer(path))
    if args.json:
        print_json({**facts, "states": {name: _as_json(state) for name, state in states.items()}})
        return 0
    for name, value in facts.items():
        if isinstance(value, Mapping):
            print_line(name)
            for key, item in value.items():
                shown = f"{readable_size(item['size']):>9}  {content.hash} {item['hash']}" if name == "files" else item
                print_line(f"  {key:<22} {shown}")
        else:
            print_line(f"{name:<24} {value}")
    for name, state in states.items():
        print_line()
        print_line(f"{name}: {summary(state)}")
        for line in lines(state, 1):
            print_line(line)
    return 0


def _outline_facts(content: Manifest, signer: str | None) -> dict[str, Any]:
    plan, metadata = (decode_plain(tree) or {} for tree in (content.plan, content.metadata))
    processes = {"processes": plan["world_size"]} if "world_size" in plan else {}
    return {
        "name": content.name,
        "kind": content.kind,
        "created": readable_date(content.created),
        "global step": content.global_step,
        **({} if signer is None else {"signature": f"by the key {signer}, not verified"}),
        **{key: value for key, value in metadata.items() if not isinstance(value, Mapping)},
        **processes,
        **{key: value for key, value in metadata.items() if isinstance(value, Mapping) and value},
        "plan": plan,
        "lineage": {**(content.lineage or {}), "ancestors": _ancestors(content)},
        "versions": content.versions,
        "files": {name: asdict(record) for name, record in content.files.items()},
    }


def _ancestors(content: Manifest) -> list[str]:
    """Name and step of each, the parent first; `trainstack checkpoints lineage` has the rest."""
    return [f"{one.name}, global step {one.global_step}" for one in Lineage.from_json(content.lineage).ancestors]


def summary(state: Any) -> str:
    """The number of tensors in a state, and their size."""
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
        inner = children(item) or []
        is_long = len(inner) > 8 and not isinstance(item, Mapping)
        if not inner or (is_long and not any(children(leaf) or isinstance(leaf, torch.Tensor) for _, leaf in inner)):
            yield f"{name:<40} {describe(item)}"
            continue
        yield name
        shown = [first for _, first in inner[:2]] if is_long else item
        yield from lines(shown, depth + 1)
        if len(shown) < len(inner):
            yield f"{'  ' * (depth + 1)}... and {len(inner) - len(shown)} more"


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    inner = children(value)
    if inner is None:
        return value
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in inner}
    return [_as_json(item) for _, item in inner]
