"""The conditions of every test: one thread, reproducible examples, and a check of torch's global state."""

from __future__ import annotations

import gc
import logging
import multiprocessing.process
import os
import random
import subprocess

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.requirements import words_of
from tools.ranks.pool import RankPool

torch.set_num_threads(1)
SEED = int(os.environ.get("TEST_SEED", "0"))

# Without a seed the examples are the same in each run. With one, `make test-long` tries many others.
EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "100"))
hypothesis.settings.register_profile("trainstack", derandomize=SEED == 0, deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("trainstack")

MEMORY = "/dev/shm"
"""A file system without a disk, on Linux. Each fsync waits milliseconds for a disk, and each training makes dozens."""
ROOM = 4 << 30  # bytes; the files of a whole run and of the two before it take less than 2 GiB
if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("TMPDIR", MEMORY)  # for child processes too
    tempfile.tempdir = None  # an import may have read the variable before

NOT_FAST = ("distributed", "processes", "slow")
"""The markers of tests that `--fast` skips."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fast`, for daily work, and `--long`, for `make test-long`."""
    parser.addoption("--fast", action="store_true", help=f"skip tests with the markers {', '.join(NOT_FAST)}")
    parser.addoption("--long", action="store_true", help="also run tests with the marker long")


@pytest.fixture(autouse=True)
def equal_random_numbers_in_every_run() -> None:
    """Begin each test with the seed `TEST_SEED`. Otherwise each run has other weights, and a test fails by chance."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def records_of_all_levels() -> Iterator[None]:
    """`caplog` collects the records of level INFO. Without this level the root logger passes only warnings."""
    logger = logging.getLogger("trainstack")
    logger.setLevel(logging.DEBUG)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_global_torch_state_left() -> Iterator[None]:
    """Fail a test that does not restore a default of torch: the next test would run with the changed one."""
    before = _torch_globals()
    yield
    after = _torch_globals()
    torch.set_default_dtype(before["default dtype"])
    torch.set_grad_enabled(before["grad mode"])
    left = [f"{name}: was {before[name]}, is {after[name]}" for name in before if before[name] != after[name]]
    if left:
        pytest.fail("the test did not restore torch's global state: " + "; ".join(left))


def _torch_globals() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def world_of_one(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make a process group of this process for each test of `ddp` or `fsdp`; the layer uses the existing group."""
    parameters = getattr(request.node, "callspec", None)
    specs = [value for value in parameters.params.values() if isinstance(value, str)] if parameters else []
    if not any(spec.split("-")[0] in ("ddp", "fsdp") for spec in specs):
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def unprobed() -> Iterator[None]:
    """Private runs of this process start without probes, in a third of the time: for tests of other parts."""
    from tools.attacks.runs import unprobed as without_probes

    with without_probes():
        yield


@pytest.fixture(autouse=True)
def no_process_without_a_marker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts a process and has no marker that `--fast` skips."""
    if any(request.node.get_closest_marker(name) for name in NOT_FAST):
        return

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the test starts a process: mark it with @pytest.mark.processes")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(RankPool, "start", refuse)  # an earlier test may have started the ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests by the options, run slow groups first, and skip GPU tests without a GPU."""
    names = (*(NOT_FAST if config.getoption("--fast") else ()), *(() if config.getoption("--long") else ("long",)))
    left_out = {item for item in items if any(item.get_closest_marker(name) for name in names)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    # Short tests fill the time in which the other workers of pytest-xdist end their last long one.
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in NOT_FAST))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Exclude the objects of imported modules from garbage collection: a full collection would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Print the text of the requirements below the traceback of a failed test."""
    report = yield
    ids = [id_ for marker in item.iter_markers("spec") for id_ in marker.args]
    if report.failed and ids:
        report.sections.append(("requirements of this test", "\n".join(f"{id_}: {words_of(id_)}" for id_ in ids)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason for skipping with its count."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:4d}  {reason}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    place = report.longrepr
    text = str(place[2]) if isinstance(place, (tuple, list)) else str(place)
    return text.removeprefix("Skipped: ")
