"""Run real launchers, and compare each run with an undisturbed one.

    python -m tools.launchers torchrun slurm ray submitit pods
    python -m tools.launchers slurm --only preempted

Each name has requirements: network namespaces for torchrun, SLURM of Debian for slurm, `pip install
'trainstack[ray]'` for ray, `pip install submitit` for submitit. A missing launcher is skipped with the reason. The tool
prints a line for each case. The exit status is 1 if one did not end as expected.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.helpers.hosts import can_make_hosts
from tools.launchers import agents, pods, slurm_node
from tools.launchers import slurm as slurm_cases
from tools.launchers.slurm_node import SlurmNode
from tools.launchers.training import samples_of_steps

Row = tuple[str, str, bool]
"""A case, its end, and whether this end is the expected one."""


def reference(folder: Path, epochs: int = 4) -> str:
    """The digest of an undisturbed training on two ranks."""
    return pods.run(folder, 2, epochs=epochs).partition(" ")[0]


def torchrun(folder: Path, only: str) -> Iterator[Row]:
    """Two hosts; one is lost, and returns in the second case."""
    for returns in (False, True):
        name = "host returns" if returns else "host is lost"
        if only not in name:
            continue
        place = folder / name.replace(" ", "-")
        (place / "alone").mkdir(parents=True)
        epochs = 8 if returns else 4
        pods.run(place / "alone", 1, epochs=epochs)
        outcome = agents.run_on_two_hosts(place, returns=returns)
        same = outcome.samples == samples_of_steps(place / "alone" / "run")
        ranks = 2 if returns else 1
        text = f"{outcome.digest}; next start after {outcome.seconds:.0f} s; the samples of each step are "
        yield (
            name,
            text + ("the same" if same else "OTHERS"),
            same and f"{12 * epochs} steps, {ranks} ranks" in outcome.digest,
        )


def slurm(folder: Path, only: str) -> Iterator[Row]:
    """The batch scripts of the documentation."""
    node_folder = folder / "node"
    node_folder.mkdir()
    (folder / "reference").mkdir()
    expected = f"{reference(folder / 'reference')} after 48 steps, 2 ranks"
    with SlurmNode(node_folder) as node:
        for together in (slurm_cases.TOGETHER, slurm_cases.ALONE):
            cases = tuple(case for case in together if only in case.__name__)
            for case, results in slurm_cases.run_cases(node, folder, cases):
                for number, result in enumerate(results):
                    yield case.__name__, str(result), slurm_cases.is_expected(case, number, result, expected)


def ray(folder: Path, only: str) -> Iterator[Row]:
    """Ray Train and Ray Tune."""
    from tools.launchers import ray_runs

    (folder / "reference").mkdir()
    expected = reference(folder / "reference")
    ray_runs.start()
    try:
        for name, how in ray_runs.TRAININGS.items():
            if only in name:
                place = folder / name.replace(" ", "-")
                place.mkdir()
                outcome = ray_runs.run_train(place, **how)
                yield name, str(outcome), outcome.digest == expected and outcome.step == 48
        if only in "tune":
            (folder / "tune").mkdir()
            trials = ray_runs.run_tune(folder / "tune")
            yield "tune", "; ".join(map(str, trials)), [trial.reports for trial in trials] == [4, 1, 1, 1]
    finally:
        ray_runs.stop()


def submitit(folder: Path, only: str) -> Iterator[Row]:
    """Both executors."""
    from tools.launchers import submitit_runs

    for name in ("reference", "local", "slurm", "node"):
        (folder / name).mkdir()
    expected = reference(folder / "reference")
    if only in "local executor":
        digests = submitit_runs.run_locally(folder / "local")
        yield "local executor", ", ".join(digests), digests == [expected] * 2
    if only in "slurm executor" and slurm_node.can_run():
        with SlurmNode(folder / "node") as node:
            fields, digests = submitit_runs.run_in_slurm(node, folder / "slurm")
        text = f"{fields['JobState']} {fields['ExitCode']}, {fields['Restarts']} requeued, {', '.join(digests)}"
        yield "slurm executor", text, digests == [expected] * 2 and fields["Restarts"] == "1"


def of_pods(folder: Path, only: str) -> Iterator[Row]:
    """Two processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only."""
    for name in ("reference", "pods"):
        (folder / name).mkdir()
    expected = reference(folder / "reference")
    found = pods.run(folder / "pods", 2, as_pods=True)
    yield "pods", found, found.startswith(expected)


def missing(name: str) -> str | None:
    """The reason why a launcher cannot run here; None if it can."""
    if name == "torchrun" and not can_make_hosts():
        return "it needs root and `ip netns add`"
    if name == "slurm" and not slurm_node.can_run():
        return slurm_node.MISSING
    if name in ("ray", "submitit") and importlib.util.find_spec(name) is None:
        return f"{name} is not installed"
    return None


LAUNCHERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "ray": ray,
    "submitit": submitit,
    "pods": of_pods,
}


def main() -> int:
    """Run the named cases; returns 1 if one did not end as expected."""
    parser = argparse.ArgumentParser(prog="python -m tools.launchers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(LAUNCHERS)} (default: all)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(LAUNCHERS))
    if unknown:
        parser.error(f"{', '.join(unknown)}: write names of {', '.join(LAUNCHERS)}")
    failed = 0
    for name in asked.names or LAUNCHERS:
        reason = missing(name)
        if reason is not None:
            print(f"{name:10} skipped: {reason}", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
            for case, text, is_right in LAUNCHERS[name](Path(folder), asked.only):
                failed += not is_right
                print(f"{name:10} {case:24} {'ok   ' if is_right else 'WRONG'} {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
