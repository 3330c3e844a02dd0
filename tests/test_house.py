"""Rules for the source: directions of imports, sizes, cost of import, use of every field."""

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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.helpers.costs import least
from tests.helpers.patience import patience
from tests.helpers.scripts import run_python

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "src" / "trainstack"

# The order of folders, lowest first; docs/architecture.md shows the same. A file imports nothing from a later entry. A
# folder's entry counts for the folders inside it that have no entry. `__init__.py` files only import names.
ORDER = (
    "*.py",
    "backends/processes",
    "backends",
    "backends/dp",
    "checkpointing",
    "step_log",
    "trainer/core",
    "trainer/tracking",
    "trainer/{arg_matching,argument_checks,argument_names,arguments,plain_arguments,argument_schemas}.py",
    "trainer/{recomputation,torch_settings,module_interface,abstract_trainer}.py",
    "trainer/data",
    "trainer/schedulers",
    "trainer/events",
    "trainer/{run_record,run_files,run_directory,context,misplaced,module_checks,start_description}.py",
    "trainer/reporting",
    "trainer/recording",
    "trainer/evaluation",
    "trainer/callbacks",
    "trainer/resume",
    "trainer/run",
    "trainer/mixins",
    "trainer/{trainer,supervised,optimizers,parser_arguments,named_parameters}.py",
    "sklearn",
    "launching",
    "verifying",
    "replaying",
    "auditing",
    "cli",
    "compat/pymarlin/utils",
    "compat",
)

MAX_FUNCTION_LINES = 40
MAX_FILES_A_FOLDER = 26
MAX_FILES = 486
MAX_LINES = 84_800

# Modules that `import trainstack` must not load: each takes time in every process, and most runs do not use it.
HEAVY = (
    "tensorboard",
    "rich",
    "sklearn",
    "matplotlib",
    "pandas",
    "scipy",
    "yaml",
    "torch._dynamo",
    "trainstack.compat",
    *(f"trainstack.backends.{name}" for name in ("dp.budget", "dp.mechanism", "dp.modes", "privacy_statement")),
)
IMPORT_BUDGET = 0.15
"""As a share of the cost of `import torch`."""


# --- reading the source


def library_files() -> list[Path]:
    return sorted(LIBRARY.rglob("*.py"))


def label(path: Path) -> str:
    """`trainstack/backends/base.py`: the name of a file in the lists above."""
    return path.relative_to(LIBRARY.parent).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file. `ast.walk` takes as long as the parser, and most tests of this file need it."""
    return list(ast.walk(parsed(path)))


# --- directions of imports


def module_name(path: Path) -> str:
    parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_imported(path: Path, modules: frozenset[str]) -> set[str]:
    """The files that `path` imports: at its top, for types only, and inside functions.

    `from package import name` is an import of `package.name` if that is a file, else of `package/__init__.py`. The
    `__init__.py` files above a file do not count, although Python runs them first: they only contain imports.
    """
    found: set[str] = set()
    package = path.relative_to(LIBRARY.parent).parent.parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {name for alias in node.names for name in (alias.name, alias.name.rpartition(".")[0])}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= inner & modules or {base}
    return (found & modules) - {module_name(path)}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    files = {module_name(path): path for path in library_files()}
    modules = frozenset(files)
    return {name: modules_imported(path, modules) for name, path in files.items()}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The rest after removing, repeatedly, files that import none of the rest or that none of the rest imports."""
    left = {name: set(imported) for name, imported in graph.items()}
    while True:
        imported = set().union(*left.values())
        ends = {name for name, targets in left.items() if not targets or name not in imported}
        if not ends:
            return [[name, *sorted(targets)] for name, targets in sorted(left.items())]
        left = {name: targets - ends for name, targets in left.items() if name not in ends}


def level(file: str) -> int:
    """The position in `ORDER` of a file, such as "trainer/run/loop.py"."""
    for position, entry in enumerate(ORDER):
        folder, _, names = entry.rpartition("/")
        listed = names == "*.py" or Path(file).stem in re.findall(r"\w+", names.removesuffix(".py"))
        if entry.endswith(".py") and file.rpartition("/")[0] == folder and listed:
            return position
    folders = [entry for entry in ORDER if not entry.endswith(".py") and file.startswith(f"{entry}/")]
    assert folders, f"{file} is in no folder of ORDER"
    return ORDER.index(max(folders, key=len))


def test_no_files_import_each_other_in_a_cycle() -> None:
    found = cycles(import_graph())
    assert not found, "files that import each other in a cycle, each with its imports:\n" + "\n".join(
        f"{name} -> {', '.join(targets)}" for name, *targets in found
    )


def test_no_import_runs_against_the_order_of_folders() -> None:
    files = {module_name(path): path.relative_to(LIBRARY).as_posix() for path in library_files()}
    levels = {name: level(file) for name, file in files.items() if not file.endswith(("__init__.py", "__main__.py"))}
    wrong = [
        f"{files[name]} imports {files[target]}"
        for name, targets in import_graph().items()
        for target in targets
        if name in levels and target in levels and levels[target] > levels[name]
    ]
    assert not wrong, "imports of a folder above:\n" + "\n".join(wrong)


def test_the_architecture_shows_the_order_of_folders() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = [line.split("  ")[0] for line in page.splitlines()]
    shown = [line for line in lines if line in ORDER]
    assert shown == list(ORDER), "docs/architecture.md shows another order of folders"


def test_cycles_are_found_over_type_only_and_deferred_imports() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "leaf"}, "leaf": set(), "root": {"a"}}
    assert cycles(graph) == [["a", "b"], ["b", "c"], ["c", "a"]]
    graph["c"].discard("a")
    assert cycles(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "from trainstack.trainer.run.loop import train_steps",
        "from trainstack.trainer.run import loop",
        "import trainstack.trainer.run.loop",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trainstack.trainer.run.loop import train_steps",
        "def f():\n    from trainstack.trainer.run.loop import train_steps",
        "from ..run.loop import train_steps",
    ],
)
def test_each_kind_of_import_counts(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = frozenset(map(module_name, library_files()))
    library = tmp_path / "trainstack"
    path = library / "trainer" / "data" / "file.py"
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "LIBRARY", library)

    assert "trainstack.trainer.run.loop" in modules_imported(path, modules)


# --- callbacks


# torch has no public name for it. A user's callback may call it, too.
PRIVATE_IN_CALLBACKS = {"torch._foreach_lerp_"}


def private_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield `(name, line)` for each private name that is not read from `self` or `cls`."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name, node.lineno) for name in names if is_private(name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            strings = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from ((ast.unparse(node), node.lineno) for text in strings if is_private(text))


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def test_ready_made_callbacks_use_no_private_names() -> None:
    """So a user can write the same callback."""
    wrong = [
        f"{label(path)}:{line} uses {name}"
        for path in sorted((LIBRARY / "trainer" / "callbacks").glob("*.py"))
        for name, line in private_names(path)
        if name not in PRIVATE_IN_CALLBACKS
    ]
    assert not wrong, "make a public member of AbstractTrainer instead:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "trainer._ready()",
        "trainer.events._log",
        "self.trainer._saver",
        "getattr(trainer, '_run')",
        "from torch.nn.modules.batchnorm import _NormBase",
        "from trainstack.trainer._run import Run",
        "import torch._dynamo",
    ],
)
def test_private_names_are_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "callback.py"
    path.write_text(f"from __future__ import annotations\nself._own = cls._own = trainer.__class__\n{line}\n")
    assert len(list(private_names(path))) == 1


# --- private names of torch


def private_torch_names(path: Path) -> Iterator[str]:
    """Private names of torch without which the file cannot be imported, in imports and in expressions.

    A name that is fetched by `getattr` may be missing. One in the body of a function is needed only at a call.
    """
    deferred = {
        id(node)
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for statement in (function.body if isinstance(function.body, list) else [function.body])
        for node in ast.walk(statement)
    }
    from_torch = {
        alias.asname or alias.name
        for node in nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "torch"
    }
    for node in nodes(path):
        if id(node) in deferred:
            continue
        paths = []
        if isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)  # before `unparse`, which is slow
            and ast.unparse(node).split(".")[0] in from_torch
        ):
            paths = [f"torch.{ast.unparse(node)}"]
        for name in paths:
            if name.split(".")[0] == "torch" and re.search(r"\._(?!_)", name):
                yield f"{label(path)}:{node.lineno} {name}"


def test_no_import_of_the_library_needs_a_private_name_of_torch() -> None:
    wrong = [name for path in library_files() for name in private_torch_names(path)]
    assert not wrong, "fetch these by getattr, with a public call as fallback (fast_paths.py):\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from torch._C import _get_tracing_state", 1),
        ("from torch.utils import _pytree as pytree", 1),
        ("import torch._dynamo", 1),
        ("import torch\nX = torch._foreach_norm", 1),
        ("from torch import nn\nclass A:\n    kind = nn.modules.batchnorm._NormBase", 1),
        ("import torch\ndef f():\n    return torch._foreach_norm", 0),
        ("import torch\nX = getattr(torch, '_foreach_norm', None)", 0),
        ("from torch import Tensor\nfrom __future__ import annotations", 0),
    ],
)
def test_private_names_of_torch_are_found(
    source: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIBRARY", tmp_path)
    (tmp_path / "file.py").write_text(source, encoding="utf-8")
    assert len(list(private_torch_names(tmp_path / "file.py"))) == count


# --- sizes


def test_no_folder_has_too_many_files() -> None:
    counts = Counter(path.parent.relative_to(LIBRARY.parent).as_posix() for path in library_files())
    over = {folder: count for folder, count in counts.items() if count > MAX_FILES_A_FOLDER}
    assert not over, f"folders with more than {MAX_FILES_A_FOLDER} files: {over}"


def test_files_and_lines_of_the_library_are_within_their_limits() -> None:
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in library_files()]
    assert len(lengths) <= MAX_FILES
    assert sum(lengths) < MAX_LINES
    assert median(lengths) >= 110, "files of a few lines: merge those that hold one idea"


def code_lines(path: Path) -> set[int]:
    """The lines with code: not blank, not only a comment."""
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


def long_functions(path: Path) -> dict[str, int]:
    """The lines of code of each function above the limit, without its docstring."""
    long = {}
    for name, function in functions(parsed(path)):
        lines = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
        if ast.get_docstring(function) is not None:
            text = function.body[0]
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        if len(lines) > MAX_FUNCTION_LINES:
            long[name] = lines
    code = code_lines(path) if long else set()  # only here, because it is slow
    counts = {f"{label(path)}:{name}": len(lines & code) for name, lines in long.items()}
    return {name: count for name, count in counts.items() if count > MAX_FUNCTION_LINES}


def test_no_function_is_too_long() -> None:
    over = {name: count for path in library_files() for name, count in long_functions(path).items()}
    assert not over, f"functions over {MAX_FUNCTION_LINES} lines of code: {over}"


def test_comments_and_docstrings_are_not_lines_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIBRARY", tmp_path)
    body = ["    '''Text.", "", "    More.'''", "    # comment", ""] + ["    x = 1"] * MAX_FUNCTION_LINES
    path = tmp_path / "file.py"
    path.write_text(
        "\n".join(["def fits():", *body[:-1], "", "class A:", "    def long(self):", *("    " + line for line in body)])
    )
    assert list(long_functions(path).values()) == [MAX_FUNCTION_LINES + 1]


def test_every_module_docstring_begins_with_a_whole_sentence() -> None:
    for path in library_files():
        text = ast.get_docstring(parsed(path)) or ""
        assert text.split("\n\n")[0].endswith("."), f"{label(path)}: {text[:80]!r}"


# --- the cost of import

PROBE = """
import json, sys, time
import torch
before, torchs = set(sys.modules), time.process_time()
import trainstack
trainstack.TrainerArguments  # the first name imports the packages
ours = time.process_time() - torchs
print(json.dumps({"share": ours / torchs, "modules": sorted(set(sys.modules) - before)}))
"""


def probe_import() -> tuple[float, list[str]]:
    """CPU time of `import trainstack` over that of `import torch`, and the modules it adds, in a new process."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience(30))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["share"], found["modules"]


@pytest.mark.processes
def test_import_is_light() -> None:
    modules: list[str] = []

    def share_of_import() -> float:  # the first one may compile the sources, and is above the budget then
        share, modules[:] = probe_import()
        return share

    share = least(share_of_import, IMPORT_BUDGET)
    heavy = [m for m in modules if any(f"{m}.".startswith(f"{root}.") for root in HEAVY)]
    assert not heavy, f"`import trainstack` loads {heavy[:5]}: import them where they are used"
    assert share < IMPORT_BUDGET, f"`import trainstack` costs {share:.2f} of `import torch`"


REPORT_PROBE = """
import json, sys
import torch, trainstack as ts
from tests.helpers.modules import Classifier, arguments
from pathlib import Path

loaded = []

class Looks(Classifier):
    def on_end_train_step(self, global_step):
        loaded.append([name for name in sys.modules if name.startswith("trainstack.trainer.reporting.report.")])

folder = Path(sys.argv[1])
ts.Trainer(Looks(), arguments(folder, report=True)).train()
print(json.dumps({"loaded": loaded[-1], "reports": len(list(folder.rglob("report.html")))}))
"""
COLLECTS_PLAIN_DATA = ("facts", "recorder")


@pytest.mark.processes
def test_a_training_does_not_import_the_writer_of_the_report(tmp_path: Path) -> None:
    done = run_python("-c", REPORT_PROBE, str(tmp_path), cwd=ROOT)  # a fork of a process without the report
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["reports"] == 1
    early = [name for name in found["loaded"] if name.rpartition(".")[2] not in COLLECTS_PLAIN_DATA]
    assert not early, f"imported during the training: {early}"


# --- nothing of a machine

MACHINE_PATH = re.compile(
    r"(?<![\w.~:/\-\]})])/(?:home|Users|root|tmp|var|opt|mnt|srv|scratch|farm|work|workspace)(?:/[\w.-]+)+"
)
GENERIC_PATHS = ("/tmp/run", "/home/user", "/home/you", "/mnt/data", "/var/log")
BUILT = {".git", ".venv", ".hypothesis", "__pycache__", "build", "dist", "runs", "site"}


def tree() -> list[Path]:
    """The files that git tracks or would track; without git, all but build results."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            return [ROOT / name for name in listed.stdout.split("\0") if name]
    return [
        path
        for path in ROOT.rglob("*")
        if not any(
            part in BUILT or part.startswith(".venv-") or part.endswith("_cache")
            for part in path.relative_to(ROOT).parts
        )
    ]


def text_files() -> Iterator[tuple[Path, str]]:
    for path in tree():
        try:
            if path.is_file():
                yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@pytest.mark.processes
def test_no_file_has_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        for match in MACHINE_PATH.finditer(line)
        if not match.group().startswith(GENERIC_PATHS)
    ]
    assert not found, "paths that only exist on one machine:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-3.10.txt"])
def test_constraints_are_portable(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    wrong = [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)]
    assert not wrong, f"not a plain name==version, run `make lock`: {wrong}"
    assert pins == sorted(pins, key=lambda pin: pin.split("==")[0])


def test_no_class_variable_without_a_type() -> None:
    """`get_type_hints` of Python 3.10, by which arguments are read, refuses a bare ClassVar."""
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in library_files()
        for node in nodes(path)
        if isinstance(node, ast.AnnAssign)
        and (getattr(node.annotation, "id", "") or getattr(node.annotation, "attr", "")) == "ClassVar"
    ]
    assert bare == []


# --- every field is read


def arguments_classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in library_files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Arguments") and node.decorator_list:
                yield path, node


def fields(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(node.annotation):
            yield node.target.id


def attributes_read() -> set[str]:
    """Every name read as `something.name`, except in `__post_init__`: a check of a value is not a use of it."""
    read = set()
    for path in library_files():
        checks = {
            id(node)
            for function in nodes(path)
            if isinstance(function, ast.FunctionDef) and function.name == "__post_init__"
            for node in ast.walk(function)
        }
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in checks:
                read.add(node.attr)
    return read


def test_every_field_of_every_arguments_class_is_read() -> None:
    read = attributes_read()
    classes = list(arguments_classes())
    assert classes, "no *Arguments class found: the test reads the wrong files"
    unread = [f"{label(path)}:{cls.name}.{f}" for path, cls in classes for f in fields(cls) if f not in read]
    assert not unread, f"fields that nothing reads: {unread}"
