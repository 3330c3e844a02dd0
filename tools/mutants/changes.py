"""All single changes that the tool can make to a source file."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.MatMult: ast.Mult,
}
_NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_TEXT_FUNCTIONS = ("__repr__", "__str__", "__rich__", "__format__")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Change:
    """One change of one file.

    Attributes:
        path: of the file, relative to the root.
        place: qualified name of the function, class or "<module>".
        kind: "comparison", "constant", "condition", "boolean", "operator", "statement", "return" or "raise".
        before, after: the statement, or the header of a compound statement, in one line.
        number: counts equal changes of one function from 1.
        start, end: byte offsets of the replaced text in the file.
        text: the new text.
        lines: the first and the last line of the statement or header.
        scope: the first and the last line of the function; None outside functions.
    """

    path: str
    place: str
    kind: str
    before: str
    after: str
    number: int
    start: int
    end: int
    text: str
    lines: tuple[int, int]
    scope: tuple[int, int] | None

    @property
    def key(self) -> str:
        """It stays the same when lines before the change move."""
        number = f" ({self.number})" if self.number > 1 else ""
        return f"{self.path} | {self.place} | {self.before} -> {self.after}{number}"

    def apply(self, source: bytes) -> bytes:
        """The source of the file with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def changes_of(root: Path, path: str) -> list[Change]:
    """All changes of the file at `path`, in the order of its text."""
    source = (root / path).read_bytes()
    finder = _Finder(path, source)
    finder.visit_body(ast.parse(source).body)
    return finder.found


class _Finder:
    """Walks through statements; it knows the enclosing function and the enclosing statement of each expression."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Change] = []
        self._path, self._source = path, source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._names: list[str] = []
        self._scope: tuple[int, int] | None = None
        self._span, self._lines = (0, 0), (0, 0)
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._visit_statement(statement)

    def _visit_statement(self, node: ast.stmt) -> None:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            self._visit_definition(node)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Nonlocal)) or _is_left_alone(node):
            return
        bodies = [getattr(node, name) for name in ("body", "orelse", "finalbody") if getattr(node, name, None)]
        handlers = [handler.body for handler in getattr(node, "handlers", [])]
        cases = [case.body for case in getattr(node, "cases", [])]
        inner = [*bodies, *handlers, *cases]
        end = self._offset(inner[0][0]) if inner else self._end(node)
        self._span = (self._offset(node), end)
        self._lines = (node.lineno, max(node.lineno, inner[0][0].lineno - 1) if inner else node.end_lineno or 0)
        self._change_statement(node)
        if not isinstance(node, ast.Raise):  # its arguments are a message
            for name, value in ast.iter_fields(node):
                if name not in ("body", "orelse", "finalbody", "handlers", "cases", "annotation"):
                    for expression in value if isinstance(value, list) else [value]:
                        if isinstance(expression, ast.AST):
                            self._visit_expression(expression)
        for body in inner:
            self.visit_body(body)

    def _visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if node.name in _TEXT_FUNCTIONS or any("overload" in ast.unparse(d) for d in node.decorator_list):
            return
        outer = self._scope
        self._names.append(node.name)
        if not isinstance(node, ast.ClassDef):
            self._scope = (node.body[0].lineno, node.end_lineno or node.lineno)
            defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None]
            for default in defaults:
                self._span, self._lines = (
                    (self._offset(default), self._end(default)),
                    (node.lineno, node.body[0].lineno),
                )
                self._visit_expression(default)
        self.visit_body(node.body)
        self._names.pop()
        self._scope = outer

    def _change_statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.If, ast.While)):
            self._negate(node.test)
        elif isinstance(node, ast.Raise):
            self._replace("raise", node, "pass")
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            self._replace("return", node, "return None")
        elif _can_be_deleted(node):
            self._replace("statement", node, "pass")
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS and not _has_text(node.value):
            other = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
            self._replace("operator", node, ast.unparse(other))

    def _visit_expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _writes_text(node)):
            return
        if isinstance(node, ast.IfExp) and _has_text(node.body) and _has_text(node.orelse):
            return
        if isinstance(node, ast.Compare):
            for index, operator in enumerate(node.ops):
                ops = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
                self._replace("comparison", node, ast.unparse(ast.Compare(node.left, ops, node.comparators)))
        elif isinstance(node, ast.BoolOp):
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            self._replace("boolean", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            self._replace("operator", node, f"({ast.unparse(node.operand)})")
        elif (
            isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not (_has_text(node) or self._is_type(node))
        ):
            other_op = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            self._replace("operator", node, f"({ast.unparse(other_op)})")
        elif isinstance(node, ast.IfExp):
            self._negate(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                self._negate(test)
        elif isinstance(node, ast.Constant):
            self._change_constant(node)
        for child in ast.iter_child_nodes(node):
            self._visit_expression(child)

    def _negate(self, test: ast.expr) -> None:
        """Negate a condition, unless another kind of change does so."""
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        compared = isinstance(test, ast.Compare) and isinstance(test.ops[0], _NEGATED) and len(test.ops) == 1
        if not (negated or compared or isinstance(test, ast.Constant)):
            self._replace("condition", test, f"(not ({self._text(test)}))")

    def _change_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace("constant", node, str(node.value + 1))
        elif isinstance(node.value, float) and node.value:
            self._replace("constant", node, f"{node.value * 2!r}")

    def _replace(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._offset(node), self._end(node)
        first, last = self._span
        before = _one_line(self._source[first:last])
        after = _one_line(self._source[first:start] + text.encode() + self._source[end:last])
        place = ".".join(self._names) or "<module>"
        if isinstance(node, ast.stmt):
            before, after = _one_line(self._source[start:end]), text
        self._seen[place, before, after] += 1
        self.found.append(
            Change(
                self._path,
                place,
                kind,
                before,
                after,
                self._seen[place, before, after],
                start,
                end,
                text,
                self._lines,
                self._scope,
            )
        )

    def _offset(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def _is_type(self, node: ast.BinOp) -> bool:
        return self._scope is None and isinstance(node.op, ast.BitOr)

    def _text(self, node: ast.expr) -> str:
        return self._source[self._offset(node) : self._end(node)].decode()


def _one_line(source: bytes) -> str:
    return " ".join(source.decode().split())


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _can_be_deleted(node: ast.stmt) -> bool:
    """Not the assignment of a local name: without it, the next use raises in every test."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, (ast.Yield, ast.YieldFrom))
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.AugAssign, ast.Break, ast.Continue, ast.Delete))


def _is_left_alone(node: ast.stmt) -> bool:
    """Docstrings, `...`, blocks for type checkers, lists of names, and log messages."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or (isinstance(node.value, ast.Call) and _logs(node.value))
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return isinstance(target, ast.Name) and target.id in ("__all__", "__slots__")
    return False


def _logs(node: ast.Call) -> bool:
    """Whether the call is one of a logger, such as `_logger.info(...)`."""
    return isinstance(node.func, ast.Attribute) and "log" in ast.unparse(node.func.value).lower().split(".")[-1].split(
        "_"
    )


def _writes_text(node: ast.Call) -> bool:
    """Whether the arguments are a message: of a warning, of a logger, or of an exception that is not raised here."""
    name = ast.unparse(node.func).rpartition(".")[2]
    return _logs(node) or name in ("warn", "warn_once") or name.endswith(("Error", "Warning"))


def _has_text(node: ast.AST) -> bool:
    """Whether the expression is a string, joins strings, or lists some."""
    if isinstance(node, ast.BinOp):
        return _has_text(node.left) or _has_text(node.right)
    if isinstance(node, (ast.List, ast.Tuple, ast.IfExp)):
        return any(_has_text(part) for part in ast.iter_child_nodes(node))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
