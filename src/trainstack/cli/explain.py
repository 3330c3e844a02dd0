"""`trainstack explain STRING` prints the layers and verbs of a backend string."""

from __future__ import annotations

import argparse
from typing import Any

from trainstack.backends import explain
from trainstack.cli.printing import print_json, print_lines


def add(subparsers: Any) -> None:
    """Add the command."""
    about = "print the layers of a backend string and the way of each verb through them"
    parser = subparsers.add_parser("explain", help=about, description=about)
    parser.add_argument("backend", metavar="STRING", help="such as ddp-bf16")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    text = explain(args.backend)
    if args.json:
        print_json({"backend": args.backend, "text": text})
    else:
        print_lines(text)
    return 0
