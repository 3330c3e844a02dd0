"""The rules of the house, read off the source: directions, sizes, cost of import, what every field is for."""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainstack
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "src" / "trainstack"

# The imports against the direction, inside a function and only when it is called. `TrainerBackend.init`, `train_dl` and
# `validate_dl` drive a stack without a Trainer; an audit of private training trains, as a user would.
DEFERRED = {
    ("trainstack/backends/base.py", "trainstack.trainer"),
    ("trainstack/backends/dp/audit/canary.py", "trainstack.trainer"),
    ("trainstack/backends/dp/audit/influence.py", "trainstack.trainer"),
}

# What stands above all packages.
ENTRIES = ("__init__", "__main__")

# Files over 300 lines and functions over 40: "trainstack/a.py" or "trainstack/a.py:Class.name" -> the reason.
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
TOO_LONG_FOR_A_REASON: dict[str, str] = {}

# What `import trainstack` may not load: each costs every process of every run, most runs never use it.
HEAVY = (
    "tensorboard",
    "rich",
    "sklearn",
    "matplotlib",
    "pandas",
    "scipy",
    "yaml",
    "torch._dynamo",
    *(f"trainstack.backends.dp.{name}" for name in ("budget", "mechanism", "modes", "statement")),
)
IMPORT_BUDGET_S = 0.25


# --- reading the source


def library_files() -> list[Path]:
    return sorted(LIBRARY.rglob("*.py"))


def label(path: Path) -> str:
    """`trainstack/backends/base.py`: the name under which a file stands in the lists above."""
    return path.relative_to(LIBRARY.parent).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# --- imports run one way


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Yield `(module, inside a function, line)` for each import of the library, relative ones resolved."""
    inside = {
        id(node)
        for function in ast.walk(parsed(path))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = imported_from(path, node)
        else:
            continue
        for name in names:
            if name.split(".")[0] == "trainstack":
                yield name, id(node) in inside, node.lineno


def imported_from(path: Path, node: ast.ImportFrom) -> list[str]:
    """`from trainstack import errors` names trainstack.errors, as `from trainstack.errors import X` does."""
    package = path.relative_to(LIBRARY.parent).parent.parts
    base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
    module = ".".join(part for part in (base, node.module) if part)
    if module == "trainstack":
        return [f"trainstack.{alias.name}" for alias in node.names]
    return [module]


def leaves() -> set[str]:
    """The modules directly in trainstack, which every package may use because they use no package."""
    return {f"trainstack.{path.stem}" for path in LIBRARY.glob("*.py") if path.stem not in ENTRIES}


def test_only_the_command_line_imports_the_command_line() -> None:
    wrong = [
        f"{label(path)}:{line} imports {module}"
        for path in library_files()
        for module, _, line in imports(path)
        if f"{module}.".startswith("trainstack.cli.") and path.parent.name != "cli" and path.stem != "__main__"
    ]
    assert not wrong, "\n".join(wrong)


def is_deferred(path: Path, module: str) -> bool:
    return any(label(path) == file and f"{module}.".startswith(f"{root}.") for file, root in DEFERRED)


@pytest.mark.parametrize("package", ["backends", "checkpointing"])
def test_packages_below_the_trainer_import_only_themselves_and_leaves(package: str) -> None:
    own = f"trainstack.{package}"
    wrong = [
        f"{label(path)}:{line} imports {module}"
        for path in sorted((LIBRARY / package).rglob("*.py"))
        for module, inside, line in imports(path)
        if not f"{module}.".startswith(f"{own}.")
        and module not in leaves()
        and not (inside and is_deferred(path, module))
    ]
    assert not wrong, "imports run trainer -> backends and trainer -> checkpointing only:\n" + "\n".join(wrong)


def test_leaves_import_only_leaves() -> None:
    """Otherwise a leaf would be a way around the direction."""
    wrong = [
        f"{label(path)}:{line} imports {module}"
        for path in sorted(LIBRARY.glob("*.py"))
        if path.stem not in ENTRIES
        for module, _, line in imports(path)
        if module not in leaves()
    ]
    assert not wrong, "a module directly in trainstack uses no package:\n" + "\n".join(wrong)


def test_every_deferred_import_is_still_needed() -> None:
    unused = [
        (file, root)
        for file, root in DEFERRED
        if not any(is_deferred(LIBRARY.parent / file, module) for module, _, _ in imports(LIBRARY.parent / file))
    ]
    assert not unused, f"take what is no longer imported off DEFERRED: {unused}"


# --- sizes


def test_no_file_is_too_long() -> None:
    long = {label(path): len(path.read_text(encoding="utf-8").splitlines()) for path in library_files()}
    over = {name: lines for name, lines in long.items() if lines > MAX_FILE_LINES and name not in TOO_LONG_FOR_A_REASON}
    assert not over, f"files over {MAX_FILE_LINES} lines: {over}. Split by idea."


def code_lines(path: Path) -> set[int]:
    """The lines that hold code: not blank, not only a comment."""
    idle = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {line for t in tokens if t.type not in idle for line in range(t.start[0], t.end[0] + 1)}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{node.name}" if prefix else node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        yield from functions(node, name)


def function_lengths(path: Path) -> dict[str, int]:
    """Lines of code of each function, its docstring not counted."""
    code = code_lines(path)
    lengths = {}
    for name, function in functions(parsed(path)):
        lines = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
        if ast.get_docstring(function) is not None:
            text = function.body[0]
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        lengths[f"{label(path)}:{name}"] = len(lines & code)
    return lengths


def test_no_function_is_too_long() -> None:
    lengths = {name: lines for path in library_files() for name, lines in function_lengths(path).items()}
    over = {n: lines for n, lines in lengths.items() if lines > MAX_FUNCTION_LINES and n not in TOO_LONG_FOR_A_REASON}
    assert not over, f"functions over {MAX_FUNCTION_LINES} lines of code: {over}"


def test_every_exception_to_the_sizes_exists_and_is_still_too_long() -> None:
    sizes = {label(path): len(path.read_text(encoding="utf-8").splitlines()) for path in library_files()}
    for path in library_files():
        sizes |= function_lengths(path)
    stale = [
        name
        for name in TOO_LONG_FOR_A_REASON
        if sizes.get(name, 0) <= (MAX_FUNCTION_LINES if ":" in name else MAX_FILE_LINES)
    ]
    assert not stale, f"take off TOO_LONG_FOR_A_REASON: {stale}"


# --- the drawing of the house


@pytest.mark.parametrize(
    ("package", "section"), [("backends", "A stack"), ("trainer", "A run"), ("checkpointing", "Checkpoints")]
)
def test_the_architecture_speaks_of_every_file(package: str, section: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    files = [path for path in sorted((LIBRARY / package).glob("[!_]*.py")) if not is_a_layer(path)]
    missing = [path.name for path in files if f"`{path.name}`" not in text]
    assert not missing, f"docs/architecture.md does not say what these files of {package}/ are for: {missing}"


def is_a_layer(path: Path) -> bool:
    """A file that registers itself, which is all that a new layer has to do."""
    return path.parent.name == "backends" and "\n@register_layer(" in path.read_text(encoding="utf-8")


# --- the cost of import

PROBE = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import trainstack
print(json.dumps({"cpu_s": time.process_time() - start, "modules": sorted(set(sys.modules) - before)}))
"""


def probe_import(compiled: Path) -> tuple[float, list[str]]:
    """CPU seconds and modules that `import trainstack` adds to `import torch`, in a fresh process."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(compiled), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience(30))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["cpu_s"], found["modules"]


@pytest.mark.processes
def test_import_is_light(tmp_path: Path) -> None:
    cpu_s, modules = probe_import(tmp_path)
    heavy = [m for m in modules if any(f"{m}.".startswith(f"{root}.") for root in HEAVY)]
    assert not heavy, f"`import trainstack` loads {heavy[:5]}: import them where they are used"
    for _ in range(3):  # the first run has compiled the sources, and others may meet a busy machine
        if cpu_s < IMPORT_BUDGET_S:
            break
        cpu_s = min(cpu_s, probe_import(tmp_path)[0])
    assert cpu_s < IMPORT_BUDGET_S, f"`import trainstack` costs {cpu_s:.2f} s of CPU over `import torch`"


# --- nothing of a machine

MACHINE_PATH = re.compile(
    r"(?<![\w.~:/\-\]})])/(?:home|Users|root|tmp|var|opt|mnt|srv|scratch|farm|work|workspace)(?:/[\w.-]+)+"
)
GENERIC_PATHS = ("/tmp/run", "/home/user", "/home/you", "/mnt/data", "/var/log")
BUILT = {".git", ".venv", ".hypothesis", "__pycache__", "build", "dist", "runs", "site"}


def tree() -> list[Path]:
    """The files that git tracks or would track; without git, all but what is built."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            return [ROOT / name for name in listed.stdout.split("\0") if name]
    return [
        path
        for path in ROOT.rglob("*")
        if not any(part in BUILT or part.endswith("_cache") for part in path.relative_to(ROOT).parts)
    ]


def text_files() -> Iterator[tuple[Path, str]]:
    for path in tree():
        try:
            if path.is_file():
                yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def test_no_path_of_a_machine_in_the_tree() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        for match in MACHINE_PATH.finditer(line)
        if not match.group().startswith(GENERIC_PATHS)
    ]
    assert not found, "paths that exist on one machine only:\n" + "\n".join(found)


def test_constraints_are_portable() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    wrong = [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)]
    assert not wrong, f"not a plain name==version, run `make lock`: {wrong}"
    assert pins == sorted(pins, key=lambda pin: pin.split("==")[0])


def test_the_version_is_the_same_in_both_places() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{trainstack.__version__}"\n' in project


# --- every field is read


def arguments_classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in library_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Arguments") and node.decorator_list:
                yield path, node


def fields(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(node.annotation):
            yield node.target.id


def attributes_read() -> set[str]:
    """Every name read as `something.name`, except in `__post_init__`: to check a value is not to use it."""
    read = set()
    for path in library_files():
        checks = {
            id(node)
            for function in ast.walk(parsed(path))
            if isinstance(function, ast.FunctionDef) and function.name == "__post_init__"
            for node in ast.walk(function)
        }
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in checks:
                read.add(node.attr)
    return read


def test_every_field_of_every_arguments_class_is_read() -> None:
    read = attributes_read()
    classes = list(arguments_classes())
    assert classes, "no *Arguments class found: the test looks in the wrong place"
    unread = [f"{label(path)}:{cls.name}.{f}" for path, cls in classes for f in fields(cls) if f not in read]
    assert not unread, f"fields that nothing reads: {unread}"
