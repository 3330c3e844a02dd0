"""README.md of an export, which is also a model card of the Hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainstack._tensor_classes import inner_tensors
from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.checkpointing.encoding import NATIVE, tensor_identity
from trainstack.checkpointing.pretrained.companions import is_adapted


def render_readme(
    model_state: Mapping[str, Any],
    name: str,
    *,
    versions: Mapping[str, str],
    plan: Mapping[str, Any] | None,
    global_step: int | None,
    metadata: Mapping[str, Any] | None,
    owner: nn.Module | None = None,
    card: Mapping[str, Any] | None = None,
    several: bool = False,
    lineage: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the text of README.md for an export of `model_state`, the state of the module `owner`.

    `several` is True if its tensors are in several files, and `lineage` is that of the manifest. The front matter is
    the metadata of a model card; the fields of `card` take precedence over those that follow from the model.
    """
    facts = {"global steps": global_step, **(metadata or {})}
    left_out = facts.pop(LEFT_OUT, None) or {}
    texts = {k: facts.pop(k) for k, value in list(facts.items()) if isinstance(value, str) and "\n" in value}
    if texts:
        facts.pop("privacy", None)  # its text is in `texts`, and the manifest has it as JSON
    tables = _tables(facts, plan, versions)
    tables["Origin"] = _origin(lineage or {})
    front = _front_matter({**_card_of(owner, metadata or {}), **(card or {})})
    parts = [front, f"# {name}", "Weights of a PyTorch model, exported by trainstack."]
    parts += _how_to_load(model_state, owner, strict=not left_out, several=several)
    if left_out:
        parts.append(
            f"{len(left_out)} frozen tensors are omitted, such as `{next(iter(left_out))}`; `MANIFEST.json` has all "
            "names. Load them first, from the source that the run used."
        )
    for title, table in tables.items():
        if table:
            rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in table.items()]
            parts += [f"## {title}", "\n".join(["| | |", "| --- | --- |", *rows])]
    parts += [f"## {title.capitalize()}\n\n```text\n{text}\n```" for title, text in texts.items()]
    parts.append(
        "`MANIFEST.json` has the size and hash of each file except this one, which is yours to edit; "
        "`trainstack checkpoints verify` compares them. No file here is a pickle."
    )
    return ("\n\n".join(parts) + "\n").encode("utf-8", "replace")


def _front_matter(card: Mapping[str, Any]) -> str:
    import yaml  # here, to keep the import of the library fast

    return f"---\n{yaml.safe_dump(dict(card), sort_keys=False, allow_unicode=True)}---"


_LIBRARIES = {
    "diffusers": "diffusers",
    "peft": "peft",
    "sentence_transformers": "sentence-transformers",
    "timm": "timm",
    "transformers": "transformers",
}
"""The names of libraries on the Hub, by their packages."""


def _card_of(owner: nn.Module | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model card that follow from the model and its run."""
    package = type(owner).__module__.partition(".")[0]
    card: dict[str, Any] = {"library_name": _LIBRARIES.get(package, "pytorch"), "tags": ["trainstack"]}
    config = getattr(owner, "config", None)
    if getattr(config, "_commit_hash", None):  # only if the model was downloaded, and not read from a folder
        card["base_model"] = config._name_or_path  # type: ignore[union-attr]
    metrics = metadata.get("metrics")
    names = map(str, metrics) if isinstance(metrics, Mapping) else ()
    measured = sorted({name.rpartition("/")[2] for name in names if name.startswith(("val/", "test/"))} - {"loss"})
    return card | ({"metrics": measured} if measured else {})


def _from_pretrained(owner: nn.Module | None) -> list[str]:
    """The lines that load an export of `owner` with its library; none if they are unknown."""
    kind = type(owner)
    package = kind.__module__.partition(".")[0]
    if package not in _LIBRARIES or not hasattr(kind, "from_pretrained"):
        return []
    if is_adapted(owner):
        call = "PeftModel.from_pretrained(base, folder)  # base: the model that the adapter was added to"
        return ["from peft import PeftModel", "", 'folder = "."  # of this file', f"model = {call}"]
    name = kind.__name__
    return [f"from {package} import {name}", "", f'model = {name}.from_pretrained(".")  # the folder of this file']


def _common_prefix(names: Iterable[str]) -> str:
    """The submodule with which all names begin, and a dot; "" if there is none."""
    first = {name.partition(".")[0] for name in names if "." in name} | {"" for name in names if "." not in name}
    return f"{first.pop()}." if len(first) == 1 and "" not in first else ""


def _tables(
    facts: Mapping[str, Any], plan: Mapping[str, Any] | None, versions: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    return {
        "Training": {k: value for k, value in facts.items() if not isinstance(value, Mapping) and value is not None},
        **{key.capitalize(): value for key, value in facts.items() if isinstance(value, Mapping)},
        "Plan": {key: value for key, value in (plan or {}).items() if value is not None},
        "Versions": versions,
    }


def _origin(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a lineage: each ancestor, the parent first, and the facts about data and environment."""
    rows: dict[str, Any] = {}
    for number, one in enumerate(lineage.get("ancestors", ())):
        step = "" if one["global_step"] is None else f", global step {one['global_step']}"
        digest = "" if one["manifest"] is None else f", SHA-256 of its manifest {one['manifest']}"
        rows["parent" if number == 0 else f"ancestor {number + 1}"] = f"{one['how']} {one['name']}{step}{digest}"
    rows |= {f"data {name}": value for name, value in (lineage.get("data") or {}).items()}
    rows |= lineage.get("environment", {})
    statement = lineage.get("privacy_statement")
    return rows | ({} if statement is None else {"SHA-256 of the privacy statement": statement})


_SEVERAL = [
    "from pathlib import Path",
    "from safetensors.torch import load_file",
    "",
    "weights = {}",
    'for file in Path(".").glob("model-*.safetensors"):',
    "    weights |= load_file(file)",
]


def _how_to_load(
    model_state: Mapping[str, Any], owner: nn.Module | None, *, strict: bool, several: bool
) -> Iterable[str]:
    yield "## Loading"
    if lines := _from_pretrained(owner):
        yield _code(lines)
    dense = (
        isinstance(value, torch.Tensor) and value.layout is torch.strided and inner_tensors(value) is None
        for value in model_state.values()
    )
    if all(dense) and all(value.dtype in NATIVE for value in model_state.values()):
        lines = ["from safetensors.torch import load_file", "", 'weights = load_file("model.safetensors")']
        lines = list(_SEVERAL) if several else lines
        lines += [f"weights[{tied!r}] = weights[{first!r}]  # one tensor" for tied, first in _tied(model_state)]
        yield "In plain PyTorch (`pip install safetensors`); names are those of the module that was trained:"
        option = "" if strict else ", strict=False"
        yield _code([*lines, f"model.load_state_dict(weights{option})"])
        if prefix := _common_prefix(model_state):
            yield f"All names begin with `{prefix}`. For that submodule alone, remove the prefix:"
            taken = f"{{name.removeprefix({prefix!r}): tensor for name, tensor in weights.items()}}"
            yield _code([f"weights = {taken}", f"network.load_state_dict(weights{option})"])
    else:
        yield (
            f"The tensors are in `model{'-*' if several else ''}.safetensors`. The state also contains values that a "
            "safetensors file cannot store, so it is read with trainstack:"
        )
    yield "With trainstack, which compares the hashes:"
    yield _code(["from trainstack import read_model", "", 'state = read_model(".")  # the folder of this file'])


def _tied(model_state: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Names of tensors that are stored once, with the name that came first."""
    first: dict[Any, str] = {}
    for name, tensor in model_state.items():
        before = first.setdefault(tensor_identity(tensor), name)
        if before != name:
            yield name, before


def _code(lines: Iterable[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
