"""The logger "trainstack" belongs to the application; the messages of a run reach it by `log_level`."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.patience import patience
from tests.helpers.scripts import run_python
from trainstack.trainer.core.logs import RunLogger


def run(program: str, *, imports: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `program` in a new process without logging configuration; with `imports`, nothing is imported before."""
    new: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": patience(60)}
    done = subprocess.run([sys.executable, "-c", program], **new) if imports else run_python("-c", program)
    assert done.returncode == 0, done.stderr
    return done


SAY = """
from trainstack.trainer.core.logs import RunLogger
log = RunLogger("INFO")
log.info("an info")
log.warning("a warning")
RunLogger("ERROR").warning("a warning of a quiet run")
"""


@pytest.mark.processes
def test_importing_sets_no_level_and_adds_a_null_handler() -> None:
    program = """
import logging
import trainstack
trainstack.Trainer  # the first use of a name imports the packages
logger = logging.getLogger("trainstack")
print(logger.level, [isinstance(handler, logging.NullHandler) for handler in logger.handlers])
"""
    assert run(program, imports=True).stdout == "0 [True]\n"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.processes
def test_the_level_of_the_application_is_not_changed(when: str) -> None:
    level = "import logging\nlogging.basicConfig(format='%(message)s')\nLOGGER.setLevel(logging.WARNING)\n"
    level = level.replace("LOGGER", "logging.getLogger('trainstack')")
    before = when == "before"
    done = run(level + SAY if before else "import trainstack\n" + level + SAY, imports=before)

    assert done.stderr == "a warning\n"


@pytest.mark.processes
def test_the_level_of_the_root_logger_applies() -> None:
    level = "logging.getLogger().setLevel(logging.INFO)\n"
    done = run("import logging\nlogging.basicConfig(format='%(message)s')\n" + SAY + level + SAY)

    assert done.stderr == "a warning\nan info\na warning\n"


@pytest.mark.processes
def test_warnings_go_to_stderr_without_configuration() -> None:
    assert run(SAY).stderr == "a warning\n"


@pytest.mark.processes
def test_a_handler_of_the_application_replaces_the_default_output() -> None:
    own = """
import logging
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("own %(message)s"))
logging.getLogger("trainstack").addHandler(handler)
"""
    assert run(own + SAY).stderr == "own a warning\n"


# --- levels of runs ------------------------------------------------------------------------------------------


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The records that a handler of the root logger gets, while the library's logger has no level."""
    monkeypatch.setattr(logging.getLogger("trainstack"), "level", logging.NOTSET)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    before = logging.getLogger().level
    yield seen
    logging.getLogger().setLevel(before)
    logging.getLogger().removeHandler(handler)
    clear_level_caches()


def clear_level_caches() -> None:
    """A logger caches the levels for which it is enabled, until a level is set."""
    logging.getLogger("trainstack").setLevel(logging.getLogger("trainstack").level)


def save(folder: Path, level: str, *, own: str | None = None, given: bool = False) -> None:
    """Train and save with this `log_level` of the run and `own` of the checkpointer, an object if `given`."""
    saving = ts.DefaultCheckpointerArguments(log_level=own, save_dir=str(folder / "checkpoints"))
    args = arguments(folder, checkpointer_args=saving, log_level=level)
    checkpointer = ts.DefaultCheckpointer(saving) if given else None
    ts.Trainer(Classifier(numbers(8)), args, checkpointer=checkpointer).train()


@pytest.mark.parametrize("given", [False, True])
def test_the_level_of_a_run_applies_to_its_checkpointer(given: bool, root: list[str], tmp_path: Path) -> None:
    logging.getLogger().setLevel(logging.INFO)
    save(tmp_path / "quiet", "ERROR", given=given)
    assert root == []
    save(tmp_path / "own", "ERROR", own="INFO", given=given)
    assert [line.partition(" ")[2][:5] for line in root] == ["saved"] * 2
    save(tmp_path / "loud", "INFO", own="warning", given=given)
    assert len(root) == 2
    save(tmp_path / "warning", "WARNING", given=given)
    assert len(root) == 2


def test_custom_level_names_of_the_application_are_accepted(
    root: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for table in ("_nameToLevel", "_levelToName"):  # `addLevelName` has no counterpart that removes a name
        monkeypatch.setattr(logging, table, dict(getattr(logging, table)))
    logging.addLevelName(5, "trace")
    logging.addLevelName(35, "NOTICE")
    logging.getLogger().setLevel(logging.INFO)
    save(tmp_path / "quiet", "NOTICE")
    assert root == []
    save(tmp_path / "loud", "trace")
    assert any("saved" in line for line in root)
    count = len(root)
    save(tmp_path / "own", "NOTICE", own="info")
    assert len(root) == count + 2


def test_two_runs_have_separate_levels(root: list[str], tmp_path: Path) -> None:
    logging.getLogger().setLevel(logging.WARNING)
    save(tmp_path / "one", "DEBUG")
    RunLogger("DEBUG").info("an info")
    RunLogger("INFO").warning("a warning")
    assert root == ["WARNING: a warning"]
    logging.getLogger().setLevel(logging.INFO)
    save(tmp_path / "silent", "ERROR")
    save(tmp_path / "talks", "INFO")
    assert [("silent" in line, "talks" in line) for line in root[1:]] == [(False, True)] * 2
