"""`trainstack schema` prints the JSON schema of the files for `--config`."""

from __future__ import annotations

import json
from typing import Any

from trainstack.cli.printing import print_lines

_ABOUT = "print the JSON schema of files for --config, for editors"


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("schema", help=_ABOUT, description=_ABOUT)
    parser.set_defaults(run=run)


def run(args: Any) -> int:
    """Print the schema. Editors complete and check YAML files with it."""
    from trainstack.trainer import TrainerArguments

    schema = TrainerArguments.to_json_schema()
    schema["properties"] |= {
        "target": {"type": "string", "description": "the module of `trainstack train`: FILE.py:NAME"},
        "module": {"type": "object", "description": "the parameters of the module"},
    }
    print_lines(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))
    return 0
