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

# The imports against the direction, inside a function and only when it is called: an audit of private training trains,
# as a user would.
DEFERRED = {
    ("trainstack/auditing/canaries.py", "trainstack.trainer"),
    ("trainstack/auditing/audit.py", "trainstack.trainer"),
}

# What stands above all packages.
ENTRIES = ("__init__", "__main__")

# Files over 300 lines and functions over 40: "trainstack/a.py" or "trainstack/a.py:Class.name" -> the reason.
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
TOO_LONG_FOR_A_REASON: dict[str, str] = {
    "trainstack/backends/base.py": "one interface: the verbs, and what a layer declares",
    "trainstack/trainer/run/loop.py": "the loop and its state are one idea",
    "trainstack/trainer/run/run.py": "a prepared run from its start to its end is one idea",
    "trainstack/trainer/trainer.py": "the public class is one class",
    "trainstack/backends/fast_paths.py": "all private names of torch that buy speed stand in one file",
}

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


ABOVE_CALLBACKS = tuple(
    f"trainstack.trainer.{name}"
    for name in ("context", "evaluating_trainer", "properties", "resume", "resuming", "run", "saving", "trainer")
)


@pytest.mark.parametrize(
    ("folder", "above"),
    [("callbacks", ABOVE_CALLBACKS), ("events", (*ABOVE_CALLBACKS, "trainstack.trainer.callbacks"))],
)
def test_callbacks_and_events_know_the_abstract_trainer_only(folder: str, above: tuple[str, ...]) -> None:
    wrong = [
        f"{label(path)}:{line} imports {module}"
        for path in sorted((LIBRARY / "trainer" / folder).glob("*.py"))
        for module, _, line in imports(path)
        if any(f"{module}.".startswith(f"{root}.") for root in above)
    ]
    assert not wrong, "annotate with AbstractTrainer, and use its members:\n" + "\n".join(wrong)


# torch has no public name for it. A user's callback may call it, too.
PRIVATE_IN_CALLBACKS = {"torch._foreach_lerp_"}


def private_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield `(name, line)` for each private name of something else than the file's own classes."""
    for node in ast.walk(parsed(path)):
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


def test_ready_made_callbacks_use_nothing_private() -> None:
    """What they can do, a user's callback can do."""
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


def test_every_deferred_import_is_still_needed() -> None:
    unused = [
        (file, root)
        for file, root in DEFERRED
        if not any(is_deferred(LIBRARY.parent / file, module) for module, _, _ in imports(LIBRARY.parent / file))
    ]
    assert not unused, f"take what is no longer imported off DEFERRED: {unused}"


# --- no cycle

# Imports that still close a cycle, as (file, module). Those of `backends` are cut by declarations of the
# layers and a driver that registers itself; those of the callbacks when they are typed by `AbstractTrainer`; the last
# when no run is refitted in its middle any more.
CYCLES_TO_CUT = {
    ("trainstack/backends/base.py", "trainstack.backends.spec"),
    ("trainstack/backends/base.py", "trainstack.backends.build"),
    ("trainstack/backends/base.py", "trainstack.trainer.run.driver"),
    ("trainstack/backends/dp/statement.py", "trainstack.backends.dp.statement"),
    ("trainstack/trainer/callbacks/monitors.py", "trainstack.trainer.trainer"),
    ("trainstack/trainer/callbacks/monitors.py", "trainstack.trainer.trainer"),
    ("trainstack/trainer/callbacks/timing.py", "trainstack.trainer.trainer"),
    ("trainstack/trainer/run/memory_fitting.py", "trainstack.trainer.run.run"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_imported(path: Path, modules: frozenset[str]) -> set[str]:
    """The files that `path` imports: at its top, for types only, and inside functions.

    `from package import name` is an import of `package.name` where that is a file, else of `package/__init__.py`. That
    Python runs the `__init__.py` above a file before the file itself does not count: those hold imports alone.
    """
    found: set[str] = set()
    package = path.relative_to(LIBRARY.parent).parent.parts
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {name for alias in node.names for name in (alias.name, alias.name.rpartition(".")[0])}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= inner & modules or {base}
    return (found & modules) - {module_name(path)}


def import_graph() -> dict[str, set[str]]:
    files = {module_name(path): path for path in library_files()}
    modules = frozenset(files)
    return {name: modules_imported(path, modules) for name, path in files.items()}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """What is left after taking away, again and again, what imports nothing that is left or is imported by nothing."""
    left = {name: set(imported) for name, imported in graph.items()}
    while True:
        imported = set().union(*left.values())
        ends = {name for name, targets in left.items() if not targets or name not in imported}
        if not ends:
            return [[name, *sorted(targets)] for name, targets in sorted(left.items())]
        left = {name: targets - ends for name, targets in left.items() if name not in ends}


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    for file, module in CYCLES_TO_CUT:
        graph.get(file.removesuffix(".py").replace("/", "."), set()).discard(module)
    found = cycles(graph)
    assert not found, "files that import each other in a circle, each with what it imports:\n" + "\n".join(
        f"{name} -> {', '.join(targets)}" for name, *targets in found
    )


def test_every_cycle_to_cut_is_one() -> None:
    graph = import_graph()
    gone = [
        (file, module)
        for file, module in CYCLES_TO_CUT
        if module not in graph.get(file.removesuffix(".py").replace("/", "."), ())
    ]
    assert not gone, f"take off CYCLES_TO_CUT what is cut: {gone}"


def test_a_circle_is_found_over_type_only_and_deferred_imports() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "leaf"}, "leaf": set(), "root": {"a"}}
    assert cycles(graph) == [["a", "b"], ["b", "c"], ["c", "a"]]
    graph["c"].discard("a")
    assert cycles(graph) == []
    deferred = modules_imported(LIBRARY / "trainer" / "reporting.py", frozenset(import_graph()))
    assert "trainstack.trainer.reporting.report.recorder" in deferred, "an import in a function"
    assert "trainstack.trainer.reporting.report.recorder" in deferred, "an import for types only"


# --- private names of torch


def private_torch_names(path: Path) -> Iterator[str]:
    """Private names of torch without which the file cannot be imported, in imports and in expressions.

    A name that is fetched by `getattr` may be missing. One in the body of a function is needed only when it is called.
    """
    deferred = {
        id(node)
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for statement in (function.body if isinstance(function.body, list) else [function.body])
        for node in ast.walk(statement)
    }
    from_torch = {
        alias.asname or alias.name
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "torch"
    }
    for node in ast.walk(parsed(path)):
        if id(node) in deferred:
            continue
        paths = []
        if isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in from_torch:
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
COLLECTS_PLAIN_DATA = ("facts", "recorder", "starting", "surroundings")


def test_nothing_of_the_html_report_is_imported_before_it_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REPORT_PROBE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
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
