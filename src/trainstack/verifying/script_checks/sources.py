"""`Source`, the syntax tree of a user's file, and the place in it that called the library."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainstack.verifying.determinism.user_sources import SourceWatch

_FRAMES = SourceWatch()


@dataclass(frozen=True)
class Source:
    """A file of the user.

    Attributes:
        path: of the file.
        text: of the file.
    """

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Source | None:
        """The file; None where it cannot be read or is not Python."""
        try:
            source = cls(path, path.read_text(encoding="utf-8"))
            _ = source.tree
        except (OSError, ValueError, SyntaxError):
            return None
        return source

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    def place(self, node: ast.AST) -> str:
        """`file:line` of a node."""
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"

    def calls_train_unguarded(self) -> ast.AST | None:
        """The call of `train()` that an import of the file would run; None where it is guarded or absent."""
        for statement in self.tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) or is_guard(statement):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and not node.args and _is_train_of_trainer(node.func):
                    return node
        return None


def is_guard(node: ast.AST) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test)


def _is_train_of_trainer(function: ast.AST) -> bool:
    """Whether a function is `train` of a trainer: `model.train()` sets the mode of a network."""
    is_train = isinstance(function, ast.Attribute) and function.attr == "train"
    return is_train and "trainer" in ast.unparse(function).lower()


def user_place(depth: int) -> str:
    """`file:line` of the frame of the user's code that is called last; "" where there is none."""
    frame = _FRAMES.find_user_frame(sys._getframe(depth))
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
