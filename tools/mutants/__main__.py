"""Make random single changes in the code that holds the promises, and count those that the tests detect.

    make mutants                                   200 changes; an interrupted run is continued
    make mutants ARGS="--quick"                    the same without traces, which take most of the time
    make mutants ARGS="--restart"                  another sample of the current source
    make mutants ARGS="--list"                     the changes that no test detected, as diffs; runs nothing
    make mutants ARGS="--again --seconds 200"      run these again, after tests were added, with more tests
    make mutants ARGS="--only backends/dp"         changes of these files only

A change is a comparison, a constant, a negated condition, and/or, an operator, a deleted statement, a return value or a
missing raise. Each one of the packages in tools/mutants/sampling.py has the same probability. The source is copied to
build/mutants at the beginning, and the checkout is never changed. A change counts as detected if a selected test fails
or does not end, and passes without the change. tools/mutants/equivalents.json has the changes without an observable
effect, each with the reason; they do not count. Other tests may detect more: the score is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.mutants.changes import Change
from tools.mutants.judging import Judge
from tools.mutants.results import DETECTED, Results, diff, score_line
from tools.mutants.runs import Runner
from tools.mutants.sampling import PACKAGES, files_of, sample
from tools.mutants.selection import Selection
from tools.mutants.trees import files_in, make_tree, take_snapshot

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = (
    "torch._dynamo",
    "torch.distributed",
    "torch.testing",
    "_hypothesis_pytestplugin",
    "xdist.plugin",
    "pytest_timeout",
)
EQUIVALENTS = Path(__file__).with_name("equivalents.json")
TRACE_CAP_S = 45.0
"""Of a test file. Cases of parametrised tests that are not traced then are taken to run the lines of a neighbour."""


class Measurement:
    """Judges the changes of a sample, and prints a line for each.

    Args:
        folder: for trees, traced lines and results.
        sample: the changes.
        equivalent: reasons by key; these changes are not run.
        seconds: the time of the tests in one round for one change.
        quick: whether changes that the first tests do not detect get no result.
        preload: modules that the processes of the runs import first.
    """

    def __init__(
        self,
        folder: Path,
        sample: Sequence[Change],
        equivalent: Mapping[str, str],
        seconds: float,
        quick: bool,
        preload: Sequence[str],
    ) -> None:
        self._folder, self._sample, self._equivalent = folder, sample, equivalent
        self._seconds, self._quick, self._preload = seconds, quick, preload
        self._lock = threading.Lock()
        self._results = Results(folder / "results.json")

    def run(self, jobs: int, again: bool) -> None:
        """Judge all changes that have no result; with `again` also those that were not detected."""
        left = [
            (index, change)
            for index, change in enumerate(self._sample, 1)
            if change.key not in self._equivalent and self._is_open(change, again)
        ]
        waiting = iter(left)  # jobs share it, so that an interrupted run has judged the first changes of the sample
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(self._run_job, job, waiting) for job in range(min(jobs, len(left)))]:
                future.result()

    def _is_open(self, change: Change, again: bool) -> bool:
        result = self._results.by_key.get(change.key)
        return result is None or (again and result["status"] not in DETECTED)

    def _next(self, waiting: Iterator[tuple[int, Change]]) -> tuple[int, Change] | None:
        with self._lock:
            return next(waiting, None)

    def _run_job(self, job: int, waiting: Iterator[tuple[int, Change]]) -> None:
        tree = self._folder / f"tree-{job}"
        make_tree(self._folder / "snapshot", tree)
        runner = Runner(tree, self._preload)
        judge = Judge(tree, runner, self._results.passing, self._results.unreliable)

        def trace(path: str) -> list[dict[str, Any]]:
            records = runner.run([path], None, TRACE_CAP_S, trace=True)[1]
            if any(record["test"] == "collection" for record in records):
                raise RuntimeError(f"pytest cannot collect {path} without a change; its output: {runner.output}")
            return records

        selection = Selection(self._folder / "snapshot", self._folder / "lines", trace)
        try:
            while (following := self._next(waiting)) is not None:
                index, change = following
                result = judge.judge_first(change, selection.likeliest(change))
                if result is None and self._quick:
                    print(f"[{index}] open  {change.key}", flush=True)
                    continue
                result = result or judge.judge(change, selection.rounds(change, self._seconds))
                with self._lock:
                    self._results.by_key[change.key] = result
                    self._results.write()
                by = f"  by {result['test']}" if result["test"] else f"  {result['tests']} tests"
                print(f"[{index}] {result['status']}  {result['seconds']} s  {change.key}{by}", flush=True)
        finally:
            runner.close()


def main(
    argv: Sequence[str] | None = None,
    root: Path = ROOT,
    packages: Mapping[str, str] = PACKAGES,
    equivalents: Path = EQUIVALENTS,
    preload: Sequence[str] = PRELOAD,
) -> int:
    """Run or list; the exit status is 0."""
    parser = argparse.ArgumentParser(prog="tools.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="the size of the sample (200)")
    parser.add_argument("--seed", type=int, help="of the sample; without it, that of the run to continue, or a new one")
    parser.add_argument("--only", default="", metavar="PATH", help="only files whose path contains PATH")
    parser.add_argument("--jobs", type=int, default=1, help="changes that are judged at a time (1)")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="time of the tests in one round for one change (40)"
    )
    parser.add_argument("--quick", action="store_true", help="no result for changes that the first tests do not detect")
    parser.add_argument("--restart", action="store_true", help="copy the source again and forget all results")
    parser.add_argument("--again", action="store_true", help="run the changes again that no test detected")
    parser.add_argument("--list", action="store_true", help="print the changes that no test detected, and run none")
    given = parser.parse_args(argv)
    folder = root / "build" / "mutants"
    if given.restart:
        shutil.rmtree(folder, ignore_errors=True)
    tests = files_in(folder / "snapshot", "tests")
    if take_snapshot(root, folder / "snapshot"):
        print("The source has changed after this measurement began. --restart measures the current source.")
    results = Results(folder / "results.json")
    if files_in(folder / "snapshot", "tests") != tests:
        results.forget_tests()
    if given.seed is not None or results.seed is None:
        results.seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
        results.write()
    files = files_of(folder / "snapshot", packages, given.only)
    chosen, total = sample(folder / "snapshot", files, results.seed, given.count)
    reasons = json.loads(equivalents.read_text())
    print(f"seed {results.seed}: {len(chosen)} of {total} changes in {len(files)} files", flush=True)
    if given.list:
        for change in chosen:
            result = results.by_key.get(change.key)
            if result is not None and result["status"] not in DETECTED and change.key not in reasons:
                print(f"\n{result['status']}: {change.key}\n{diff(folder / 'snapshot', change)}")
    else:
        Measurement(folder, chosen, reasons, given.seconds, given.quick, preload).run(given.jobs, given.again)
    print(score_line(chosen, Results(folder / "results.json").by_key, reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
