"""README.md of a model export: what it is, and how it is loaded with and without this library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainstack.checkpointing.dtypes import NATIVE
from trainstack.checkpointing.leaves import tensor_identity

FILE_NAME = "README.md"


def render_readme(
    model_state: Mapping[str, Any],
    name: str,
    *,
    versions: Mapping[str, str],
    plan: Mapping[str, Any] | None,
    global_step: int | None,
    metadata: Mapping[str, Any] | None,
) -> bytes:
    """Return the text of README.md for an export of `model_state`."""
    facts = {"optimizer updates": global_step, **(metadata or {})}
    tables = {
        "Training": {
            key: value for key, value in facts.items() if not isinstance(value, Mapping) and value is not None
        },
        **{key.capitalize(): value for key, value in facts.items() if isinstance(value, Mapping)},
        "Plan": {key: value for key, value in (plan or {}).items() if value is not None},
        "Versions": versions,
    }
    parts = [f"# {name}", "Weights of a PyTorch model, exported by trainstack.", *_how_to_load(model_state)]
    for title, table in tables.items():
        if table:
            parts += [f"## {title}", _table(table)]
    parts.append(
        "`MANIFEST.json` holds the size and hash of each file but this one, which is yours to edit; "
        "`trainstack checkpoints verify` compares them. No file here is a pickle."
    )
    return ("\n\n".join(parts) + "\n").encode("utf-8", "replace")


def _how_to_load(model_state: Mapping[str, Any]) -> Iterable[str]:
    yield "## Loading"
    if all(isinstance(value, torch.Tensor) and value.dtype in NATIVE for value in model_state.values()):
        lines = ["from safetensors.torch import load_file", "", 'weights = load_file("model.safetensors")']
        lines += [f"weights[{tied!r}] = weights[{first!r}]  # one tensor" for tied, first in _tied(model_state)]
        yield "In plain PyTorch (`pip install safetensors`); names are those of the module that was trained:"
        yield _code([*lines, "model.load_state_dict(weights)"])
    else:
        yield (
            "The tensors lie in `model.safetensors`. The state also holds what is no tensor of a safetensors file, so "
            "it is read with trainstack:"
        )
    yield "With trainstack, which compares the hashes:"
    yield _code(["from trainstack import read_model", "", 'state = read_model(".")  # the folder of this file'])


def _tied(model_state: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Names of tensors that are stored once, under the name that came first."""
    first: dict[Any, str] = {}
    for name, tensor in model_state.items():
        before = first.setdefault(tensor_identity(tensor), name)
        if before != name:
            yield name, before


def _code(lines: Iterable[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _table(rows: Mapping[str, Any]) -> str:
    cells = [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *cells])


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
