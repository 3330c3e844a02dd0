"""opacus is imported for the first computation, does not configure logging, and the error names it if it is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from tests.helpers.patience import patience
from trainstack.backends.dp import epsilon, epsilon_of, gaussian_epsilon
from trainstack.errors import ConfigurationError, MissingExtraError

QUIET = """
import logging, sys, warnings
import trainstack, trainstack.backends.dp as dp
assert not {"opacus", "scipy"} & set(sys.modules), "imported too early"
filters, handlers, level = list(warnings.filters), list(logging.root.handlers), logging.root.level
dp.epsilon_of([(1.0, 0.1, 3)], 1e-5)
assert "opacus" in sys.modules
assert (logging.root.handlers, logging.root.level) == (handlers, level), "logging was set up"
assert warnings.filters == filters
"""


@pytest.mark.processes
@pytest.mark.spec("O19")
def test_opacus_is_imported_late_and_configures_no_logging() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUIET], capture_output=True, text=True, timeout=patience(30)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("missing", ["opacus", "scipy"])
def test_a_missing_package_is_answered_with_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(epsilon.importlib, "import_module", fail)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{missing}'.*trainstack\[dp\]"):
        epsilon_of([(1.25, 0.125, 3)], 1e-5)
    assert gaussian_epsilon(1.0, 1e-5) > 0  # closed forms need neither


def test_a_missing_submodule_is_not_reported_as_missing_opacus() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"opacus\.nothing"):
        epsilon.import_opacus("opacus.nothing")


@pytest.mark.spec("O12")
def test_an_opacus_that_reports_too_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.5.4")
    with pytest.raises(ConfigurationError, match=r"opacus 1\.5\.4 is installed, which is too old"):
        epsilon.import_opacus()
