"""Whether the selected tests detect a change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.changes import Change
from tools.mutants.runs import Runner
from tools.mutants.trees import changed

FIRST_CAP_S = 200.0
"""For the first run. It needs no end: tests that are not run then are selected by a trace."""
LEAST_CAP_S = 90.0
CAP_FACTOR = 6
"""A run may take this multiple of the time of its traced tests, and at least `LEAST_CAP_S`, for a busy machine."""


class Judge:
    """Makes changes in one tree and runs tests there.

    Args:
        tree: a copy of the checkout.
        runner: of this tree.
        passing: ids of tests that have passed without a change; the judge adds to them.
        unreliable: ids of tests that have failed without a change; the judge adds to them.
    """

    def __init__(self, tree: Path, runner: Runner, passing: set[str], unreliable: set[str]) -> None:
        self._tree, self._runner = tree, runner
        self._passing, self._unreliable = passing, unreliable
        self._changes = 0

    def judge_first(self, change: Change, files: Sequence[str]) -> dict[str, Any] | None:
        """Run a few cases of each test of these files, for `FIRST_CAP_S` at most.

        Returns:
            As `judge`; None if no test failed.
        """
        began = time.monotonic()
        self._changes += 1
        with changed(self._tree, change, self._changes):
            outcomes = self._runner.run(files, None, FIRST_CAP_S)[1]
        failed = next((each for each in outcomes if each["outcome"] == "failed"), None)
        if failed is None or not self._is_caused(failed, files):
            return None
        seconds = round(time.monotonic() - began, 1)
        return {"status": "killed", "test": failed["test"], "tests": len(outcomes), "seconds": seconds}

    def _is_caused(self, failed: dict[str, Any], files: Sequence[str]) -> bool:
        if failed["test"] == "collection":
            return not self._runner.run(files, [], FIRST_CAP_S)[1]
        return failed["test"] not in self._unreliable and self._passes(failed["test"], [failed])

    def judge(self, change: Change, rounds: Iterable[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Run rounds of tests until one of them fails or does not end.

        A test counts only if it passes without the change.

        Returns:
            "status" ("killed", "timed out", "survived" or "not run"), the "test" that failed, the number of "tests" and
            "seconds".
        """
        began = time.monotonic()
        status, culprit, count = "not run", "", 0
        for tests in rounds:
            tests = self._reliable(tests)
            while tests:
                self._changes += 1
                with changed(self._tree, change, self._changes):
                    status, culprit = self._run(tests)
                if status == "survived" or self._passes(culprit, tests):
                    break
                status, culprit = "not run", ""
                tests = self._reliable(tests)
            count += len(tests)
            if culprit:
                break
        status = "survived" if count and not culprit else status
        return {"status": status, "test": culprit, "tests": count, "seconds": round(time.monotonic() - began, 1)}

    def _reliable(self, tests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [test for test in tests if test["test"] not in self._unreliable]

    def _run(self, tests: Sequence[dict[str, Any]]) -> tuple[str, str]:
        ids = [test["test"] for test in tests]
        cap_s = max(LEAST_CAP_S, CAP_FACTOR * sum(test["seconds"] for test in tests))
        in_time, outcomes = self._runner.run(_files(ids), ids, cap_s)
        failed = [each["test"] for each in outcomes if each["outcome"] == "failed"]
        if failed:
            return "killed", failed[0]
        if not in_time:
            ended = {each["test"] for each in outcomes}
            return "timed out", next((test for test in ids if test not in ended), ids[-1])
        return "survived", ""

    def _passes(self, culprit: str, tests: Sequence[dict[str, Any]]) -> bool:
        """Whether the test passes without the change. A change that prevents the collection counts as detected."""
        if culprit == "collection" or culprit in self._passing:
            return True
        status, _ = self._run([test for test in tests if test["test"] == culprit])
        (self._passing if status == "survived" else self._unreliable).add(culprit)
        return status == "survived"


def _files(ids: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in ids))
