"""Runs of pytest in forks of a process that has imported torch, which saves seconds of each run."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).resolve().parent / "plugin"
_POLL_S = 0.05


class Runner:
    """Runs pytest in one copied tree.

    Args:
        tree: a folder with `src` and the tests; the working directory of the runs.
        preload: modules that the process imports before it forks. None of them imports the library.

    Attributes:
        output: the file with the output of the last run.
    """

    def __init__(self, tree: Path, preload: Sequence[str]) -> None:
        self._tree = tree
        self.output = tree / "build" / "mutants-run" / "output.txt"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.runs", *preload],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, files: Sequence[str], tests: Sequence[str] | None, cap_s: float, trace: bool = False
    ) -> tuple[bool, list[dict[str, Any]]]:
        """Run tests.

        Args:
            files: test files, relative to the tree.
            tests: ids of the tests in these files to run, in their order. None for all of them with `trace`, and for
                three cases of each test that is not slow without it.
            cap_s: the run is killed after this time, in seconds.
            trace: record the lines that each test runs. Otherwise the run ends with the first failure.

        Returns:
            Whether the run ended in time, and a dict for each test that ended: "test", "outcome", "seconds", "lines",
            and "like", the ids of other cases of a parametrised test, which are likely to run the same lines.
            A run that cannot collect its tests has one failed entry with the test "collection".
        """
        folder = self._tree / "build" / "mutants-run"
        folder.mkdir(parents=True, exist_ok=True)
        results = folder / "results.jsonl"
        results.write_bytes(b"")
        (folder / "generation").write_bytes(b"\0")
        (folder / "lines").write_bytes(b"")
        job = folder / "job.json"
        job.write_text(json.dumps({"tests": tests, "results": str(results)}))
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, (self._tree / "src", self._tree, PLUGIN))),
            "MUTANTS_JOB": str(job),
            "MUTANTS_SOURCE": str(self._tree / "src"),
            "MUTANTS_TRACE": str(folder) if trace else "",
        }
        # The process has imported pytest's plugins before pytest could rewrite their asserts.
        arguments = ["-q", "-p", "mutants_plugin", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
        arguments += [*([] if trace else ["-x"]), *(["-m", "not slow"] if tests is None and not trace else []), *files]
        request = {
            "tree": str(self._tree),
            "environment": environment,
            "arguments": arguments,
            "output": str(self.output),
            "cap_s": cap_s,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = json.loads(self._server.stdout.readline())
        outcomes = [json.loads(line) for line in results.read_text().splitlines()]
        if status not in (None, 0, 1, 5) and not any(each["outcome"] == "failed" for each in outcomes):
            outcomes.append({"test": "collection", "outcome": "failed", "seconds": 0.0})
        return status is not None, outcomes

    def close(self) -> None:
        """End the process."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def _fork(request: Mapping[str, Any]) -> int | None:
    """Run one request in a fork; its exit status, None if it came to its cap."""
    child = os.fork()
    if not child:
        os.setsid()  # so that the cap also ends the processes of a test
        _enter(request)
        import pytest

        status = int(pytest.main(request["arguments"]))
        sys.stdout.flush()
        os._exit(status)
    owner = os.getppid()
    deadline = time.monotonic() + request["cap_s"]
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        late = not ended and (time.monotonic() > deadline or os.getppid() != owner)  # a killed tool ends its runs
        if ended or late:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if late:
            os.waitpid(child, 0)
            return None
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)


def _enter(request: Mapping[str, Any]) -> None:
    """Take the working directory, the environment, the output file and the import path of the run."""
    tree = request["tree"]
    os.chdir(tree)
    os.environ.update(request["environment"])
    for number, name, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        os.dup2(os.open(name, mode), number)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "tests")]:
        del sys.modules[name]  # the tree has its copies
    sys.path[:] = [*request["environment"]["PYTHONPATH"].split(os.pathsep), *sys.path[1:]]
    importlib.invalidate_caches()


def main() -> None:
    """Serve until the input ends; the arguments name modules to import first."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    with suppress(BrokenPipeError):  # the tool was killed
        for line in sys.stdin:
            print(json.dumps(_fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
