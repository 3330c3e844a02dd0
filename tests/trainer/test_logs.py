"""The logger "trainstack" belongs to the application; what a run says reaches it by `log_level`."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run `program` in a process of its own, where nothing has configured logging."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
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
logger = logging.getLogger("trainstack")
print(logger.level, [isinstance(handler, logging.NullHandler) for handler in logger.handlers])
"""
    assert run(program).stdout == "0 [True]\n"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.processes
def test_a_level_of_the_application_survives(when: str) -> None:
    level = "import logging\nlogging.basicConfig(format='%(message)s')\nLOGGER.setLevel(logging.WARNING)\n"
    level = level.replace("LOGGER", "logging.getLogger('trainstack')")
    done = run(level + SAY if when == "before" else "import trainstack\n" + level + SAY)

    assert done.stderr == "a warning\n"


@pytest.mark.processes
def test_what_a_run_lets_through_reaches_the_handlers_of_the_application() -> None:
    done = run("import logging\nlogging.basicConfig(format='%(message)s')\n" + SAY)

    assert done.stderr == "an info\na warning\n"


@pytest.mark.processes
def test_warnings_go_to_stderr_where_nothing_is_configured() -> None:
    assert run(SAY).stderr == "a warning\n"


@pytest.mark.processes
def test_a_handler_of_the_application_on_the_logger_is_enough() -> None:
    own = """
import logging
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("own %(message)s"))
logging.getLogger("trainstack").addHandler(handler)
"""
    assert run(own + SAY).stderr == "own an info\nown a warning\n"
