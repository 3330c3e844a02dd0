"""List the messages of all errors in the source of the library; `--check` compares docs/troubleshooting.md with them.

`python tools/messages.py` prints class, place and message of each, with `...` for variable parts. `--check` fails if
the page has no section for a public error, or quotes a message that no error has.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "src" / "trainstack"
PAGE = ROOT / "docs" / "troubleshooting.md"
VARIES = "..."

_NOT_ERRORS = ("AssertionError", "NotImplementedError")
_REFUSALS = {"refuse": "PrivacyError", "_refuse": "PrivacyError"}
"""Functions of backends/dp that raise an error with a given message, or record the message in the statement."""
_QUOTED = re.compile(r"^\| `(?P<message>[^`]+)` \|", re.MULTILINE)
_SECTION = re.compile(r"^## (?P<name>\w+)$", re.MULTILINE)


class Message(NamedTuple):
    """One message of an error.

    Attributes:
        error: the name of its class.
        place: file and line, from the root of the library.
        text: with `...` for variable parts.
    """

    error: str
    place: str
    text: str


def public_errors() -> list[str]:
    """The names of the classes of errors in errors.py."""
    tree = ast.parse((LIBRARY / "errors.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return [name for name in names if name.endswith("Error")]


@functools.cache
def messages() -> tuple[Message, ...]:
    """The messages of all errors in the library, by file and line."""
    found: list[Message] = []
    for path in sorted(LIBRARY.rglob("*.py")):
        label = path.relative_to(LIBRARY).as_posix()
        refusals = _REFUSALS if label.startswith("backends/dp/") else {}
        for call, function, tree in _errors_made(ast.parse(path.read_text(encoding="utf-8")), refusals):
            texts = _texts(call.args[0], function, tree) if call.args else []
            name = refusals.get(_name(call.func), _name(call.func))
            found += [Message(name, f"{label}:{call.lineno}", text) for text in texts]
    return tuple(found)


def _errors_made(tree: ast.Module, refusals: Collection[str]) -> Iterator[tuple[ast.Call, ast.AST, ast.Module]]:
    """Each call that makes an error or is one of `refusals`, with the innermost function around it."""

    pending: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while pending:
        node, function = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in refusals or (name.endswith("Error") and name not in _NOT_ERRORS):
                yield node, function, tree
        pending += [(child, function) for child in reversed(list(ast.iter_child_nodes(node)))]


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _texts(node: ast.expr, function: ast.AST, tree: ast.Module) -> list[str]:
    """The possible values of an expression as text. Names and calls are resolved one level deep within the file."""
    if isinstance(node, ast.Name):
        values = [n.value for n in ast.walk(function) if isinstance(n, ast.Assign) and _name(n.targets[0]) == node.id]
    elif isinstance(node, ast.Call):
        called = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == _name(node.func)]
        values = [n.value for f in called for n in ast.walk(f) if isinstance(n, ast.Return) and n.value is not None]
    else:
        values = []
    return [_text(value) for value in values] or [_text(node)]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return VARIES


def quotes(page: str) -> list[str]:
    """The messages that the page quotes: code in the first cells of its tables."""
    return _QUOTED.findall(page)


def occurs(quoted: str, text: str) -> bool:
    """Whether `quoted` may be a part of the message `text`; `...` in either matches any text."""
    pieces = [piece.strip() for piece in quoted.split(VARIES)]
    return re.search(".*".join(map(re.escape, pieces)), text, re.DOTALL) is not None


def problems(page: str, known: Sequence[Message], errors: list[str]) -> list[str]:
    """The faults of the page as messages."""
    sections = set(_SECTION.findall(page))
    wrong = [f"{PAGE.name} has no section '## {name}'" for name in errors if name not in sections]
    for part in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        section = _SECTION.match(part)
        if section is None or section["name"] not in errors:
            continue
        texts = [message.text for message in known if message.error == section["name"]]
        for quoted in quotes(part):
            if not any(occurs(quoted, text) for text in texts):
                wrong.append(f"no {section['name']} has a message like: {quoted}")
    return wrong


def main() -> None:
    """Print the list, or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare docs/troubleshooting.md with the messages")
    known = messages()
    if not parser.parse_args().check:
        for message in sorted(known):
            print(f"{message.error}  ({message.place})\n    {message.text}")
        return
    wrong = problems(PAGE.read_text(encoding="utf-8"), known, public_errors())
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{PAGE.name}: a section for each error, and every message that it quotes is one of the {len(known)}")


if __name__ == "__main__":
    main()
