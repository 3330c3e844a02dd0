"""The examples of docstrings run after the code of docs/api/index.md, and print the output that they show."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

from tools.pages import ROOT, Block, Runner, blocks_of

START = blocks_of(ROOT / "docs" / "api" / "index.md")[0]
SHORTENED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# They start processes, import optuna, or calibrate noise: seconds each.
LONG = {"launch", "replay", "verify_resume", "OptunaPruning", "DifferentialPrivacyArguments"}

MOST_USED = {
    *("Trainer", "TrainerArguments", "ModuleInterface", "SupervisedModule", "Callback", "TrainingPlan", "Every"),
    *("seed_everything", "find_lr", "read_history", "compare_runs", "build_optimizer", "parameter_groups", "metric_of"),
    *("EMA", "Freezer", "EarlyStopping", "BestCheckpoint", "ExtraValidation", "LRMonitor", "MovingAverage", "Profiler"),
    *("build_scheduler", "warmup_cosine", "warmup_linear", "warmup_stable_decay", "inverse_sqrt", "SchedulerConfig"),
    *("DefaultCheckpointerArguments", "list_checkpoints", "read_model", "export_model", "warm_start", "make_key"),
    *("explain", "build_trainer_backend", "register_layer", "register_writer", "rank_zero_only", "run_step"),
    *LONG,
}


def documented() -> dict[str, str]:
    """The docstrings with an example, by the name of their class or function."""
    found = {}
    for path in sorted((ROOT / "src" / "trainstack").rglob("*.py")):
        if ">>> " in (source := path.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and ">>> " in (ast.get_docstring(node) or ""):
                    assert node.name not in found, f"two examples of {node.name}"
                    found[node.name] = ast.get_docstring(node) or ""
    return found


DOCUMENTED = documented()
EACH = [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in DOCUMENTED]


class ShownOutput(doctest.OutputChecker):
    """Compares the output of the lines that show one; a training without output shown may print."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def faults_of(docstring: str) -> str:
    """Run the examples of a docstring in this process; an error or another output is a fault."""
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(START.source, "docs/api/index.md", "exec"), names)
    examples = doctest.DocTestParser().get_doctest(docstring, names, "docstring", None, 0)
    runner = doctest.DocTestRunner(ShownOutput(), optionflags=SHORTENED)
    faults: list[str] = []
    runner.run(examples, out=faults.append)
    assert runner.tries
    return "".join(faults)


def faults_of_script(docstring: str, folder: Path) -> str:
    """The same in a script, which new processes can import."""
    examples = doctest.DocTestParser().get_examples(docstring)
    source, shown = ("".join(getattr(one, part) for one in examples) for part in ("source", "want"))
    with Runner() as runner:
        printed = runner.run([START, Block(0, source, shown)], folder)[1]
    last = "".join(printed.splitlines(keepends=True)[-shown.count("\n") :])
    return "" if ShownOutput().check_output(shown, last, SHORTENED) else printed


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EACH)
def test_the_examples_of_a_docstring_run_and_print_their_output(name: str, tmp_path: Path) -> None:
    docstring = DOCUMENTED[name]
    assert (faults_of_script(docstring, tmp_path) if "__main__" in docstring else faults_of(docstring)) == ""


def test_the_most_used_names_have_an_example() -> None:
    assert MOST_USED - set(DOCUMENTED) == set()


@pytest.mark.parametrize(
    ("example", "fault"),
    [
        (">>> args.epochs\n3", "Got:\n    2\n"),
        (">>> ts.TrainerArguments(epoch=2)", "ConfigurationError"),
        (">>> ts.no_such_name", "no_such_name"),
    ],
)
def test_a_wrong_example_is_a_fault(example: str, fault: str) -> None:
    assert fault in faults_of(f"Does something.\n\nExamples:\n    {example.replace(chr(10), chr(10) + '    ')}\n")
