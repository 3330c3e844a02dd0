"""`trainstack checkpoints diff`: in what two checkpoints differ, bit by bit."""

from __future__ import annotations

import argparse
from typing import Any

from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.difference import Difference, differences
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.reading import read_states
from trainstack.cli.printing import print_json, print_line


def diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints; 0 if all bits agree, else 1."""
    (one, states), (other, other_states) = read_states(args.one), read_states(args.other)
    model_only = args.model or one.kind == "model" or other.kind == "model"
    if model_only:
        found = list(differences(_model_of(states), _model_of(other_states), "model"))
    else:
        found = list(differences({**states, **_facts(one)}, {**other_states, **_facts(other)}))
    if args.json:
        rows = [{name: getattr(row, name) for name in Difference.__dataclass_fields__} for row in found]
        print_json({"same": not found, "compared": "model" if model_only else "all", "differences": rows})
    else:
        for row in found:
            print_line(str(row))
        what = "the weights" if model_only else "all states, plans and versions"
        print_line(f"{len(found)} differences in {what}" if found else f"{what} agree in every bit")
    return 1 if found else 0


def _model_of(states: dict[str, Any]) -> Any:
    return next(iter(states.values()))  # the module's state comes first in both kinds


def _facts(content: Manifest) -> dict[str, Any]:
    plain = StateDecoder({})
    return {
        "plan": plain.decode(content.plan),
        "metadata": plain.decode(content.metadata),
        "versions": content.versions,
    }
