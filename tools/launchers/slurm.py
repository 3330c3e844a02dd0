"""The batch scripts of docs/recipes/cluster.md under a real SLURM: signals, preemption, requeue, arrays, failures.

Each case submits a script of the page with another number of ranks and another command, and disturbs the job. An
interrupted job has to be requeued once and to end with the weights of the undisturbed one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.launchers.slurm_node import ROOT, SlurmNode, wait_for
from tools.launchers.training import samples_of_steps

PAGE = ROOT / "docs" / "recipes" / "cluster.md"
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A submitted job.

    Attributes:
        node: the SLURM that runs it.
        number: the number of the job.
        run: its output_dir.
    """

    node: SlurmNode
    number: str
    run: Path

    def wait_for_step(self, step: int) -> None:
        """Wait until its run has made the step `step`."""
        wait_for(lambda: step in samples_of_steps(self.run), LIMIT_S, f"step {step} of job {self.number}")

    def wait_for_file(self, name: str) -> None:
        """Wait until its run has written the file `name`."""
        wait_for((self.run / name).exists, LIMIT_S, f"{name} of job {self.number}")

    def signal(self, name: str = "USR1") -> None:
        """Send a signal to its tasks, not to the batch script, as `#SBATCH --signal` does."""
        self.node.call("scancel", "-s", name, self.number)

    def end(self) -> Result:
        """Wait for the end of the job."""
        fields = self.node.end(self.number, LIMIT_S)
        written = self.run / "digest"
        return Result(
            state=fields["JobState"],
            code=fields["ExitCode"],
            restarts=int(fields["Restarts"]),
            digest=written.read_text() if written.exists() else "",
            output=Path(fields["StdOut"]).read_text(),
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a job.

    Attributes:
        state: the JobState of SLURM.
        code: the exit code of the batch script, a colon, and its signal.
        restarts: the number of requeues.
        digest: the digest of the weights, with the number of steps; "" if the training has not finished.
        output: the output of the job.
    """

    state: str
    code: str
    restarts: int
    digest: str
    output: str

    def __str__(self) -> str:
        return f"{self.state} {self.code}, {self.restarts} requeued, {self.digest or 'no weights'}"


def scripts() -> list[str]:
    """The blocks of the page that submit or start a job: with srun python, and the lines with torchrun."""
    blocks: list[str] = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    batch = next(block for block in blocks if "#SBATCH" in block)
    torchrun = next(block for block in blocks if block.startswith("srun") and "torchrun" in block)
    line = re.search(r"^srun .*$", batch, re.M)
    assert line is not None
    return [batch, batch.replace(line[0], torchrun.rstrip())]


def fitted(script: str, command: str, run: str) -> str:
    """A script of the page for two ranks on this node."""
    size = r"^#SBATCH --(nodes|ntasks-per-node|gpus-per-node|cpus-per-task|time|job-name).*\n"
    text = re.sub(size, "", script, flags=re.M)
    text = text.replace("#!/bin/bash\n", "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=2\n")
    text = re.sub(r"^run=\S+.*$", f'run="{run}"\nexport TRAINING_OUTPUT="$run"', text, flags=re.M)
    text = text.replace("--nproc-per-node=8", "--nproc-per-node=2").replace(":29400", ":$((20000 + SLURM_JOB_ID))")
    text = text.replace("--since", "--without-progress 1 --since")
    return text.replace("python train.py", command).replace(" train.py", " -m tools.launchers.training")


COMMAND = "python -m tools.launchers.training"


def submit(
    node: SlurmNode,
    folder: Path,
    *options: str,
    script: int = 0,
    command: str = COMMAND,
    array: bool = False,
    **how: str,
) -> Job:
    """Submit a script of the page; `how` are options of the training."""
    folder.mkdir()
    run = f"{folder}/run" + ("-$SLURM_ARRAY_TASK_ID" if array else "")
    file = folder / "job.sh"
    file.write_text(fitted(scripts()[script], command, run))
    variables = {f"TRAINING_{name.upper()}": value for name, value in ({"step_s": "0.1"} | how).items()}
    output = folder / ("out-%a" if array else "out")
    number = node.submit(file, f"--output={output}", f"--chdir={ROOT}", *options, **variables)
    return Job(node=node, number=number, run=folder / "run")


def undisturbed(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """The job is not disturbed."""
    yield submit(node, folder).end()


def signal_in_the_middle(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """Rank 0 takes two seconds to exit, with --kill-on-bad-exit=1: srun may end with 143."""
    job = submit(node, folder, exit_s="2")
    job.wait_for_step(20)
    job.signal()
    yield job.end()


def signal_while_preparing(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """The signal arrives before the first step."""
    job = submit(node, folder, prepare_s="6")
    job.wait_for_file("preparing")
    job.signal()
    yield job.end()


def signal_while_importing(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """The signal arrives before a trainer exists: srun ends with 138."""
    job = submit(node, folder, import_s="6")
    job.wait_for_file("importing")
    job.signal()
    yield job.end()


def signal_to_a_wrapper(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """srun starts a shell, which starts Python without exec."""
    job = submit(node, folder, command=f"sh -c '{COMMAND}; exit $?'")
    job.wait_for_step(20)
    job.signal()
    yield job.end()


def signal_to_torchrun(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """torchrun ends with 1."""
    job = submit(node, folder, script=1)
    job.wait_for_step(20)
    job.signal()
    yield job.end()


def requeued_from_outside(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """`scontrol requeue JOB`."""
    job = submit(node, folder)
    job.wait_for_step(20)
    node.call("scontrol", "requeue", job.number)
    yield job.end()


def array(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """Two tasks with separate folders; the second gets a signal."""
    both = submit(node, folder, "--array=0-1", array=True)
    tasks = [Job(node=node, number=f"{both.number}_{task}", run=folder / f"run-{task}") for task in range(2)]
    tasks[1].wait_for_step(20)
    tasks[1].signal()
    for task in tasks:
        yield task.end()


def rank_fails(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """Rank 1 fails before the rendezvous, and --kill-on-bad-exit=1 ends both."""
    yield submit(node, folder, fails="1").end()


def preempted(node: SlurmNode, folder: Path) -> Iterator[Result]:
    """A job of the partition `high` requests the whole node."""
    job = submit(node, folder)
    job.wait_for_step(20)
    other = folder / "high.sh"
    other.write_text("#!/bin/sh\nsleep 1\n")
    node.submit(other, "--partition=high", "--exclusive", f"--output={folder / 'high'}")
    yield job.end()


Case = Callable[[SlurmNode, Path], Iterator[Result]]
TOGETHER: tuple[Case, ...] = (
    undisturbed,
    signal_in_the_middle,
    signal_while_preparing,
    signal_while_importing,
    signal_to_a_wrapper,
    signal_to_torchrun,
    requeued_from_outside,
    array,
    rank_fails,
)
ALONE: tuple[Case, ...] = (preempted,)


def is_expected(case: Case, number: int, result: Result, digest: str) -> bool:
    """Whether a job of a case has ended as expected.

    Args:
        case: the case.
        number: the index of the job among those of the case.
        result: the end of the job.
        digest: the digest of the undisturbed training.
    """
    if case is rank_fails:  # one requeue is allowed: rank 0 cannot distinguish the signal from a preemption
        return result.state == "FAILED" and result.restarts <= 1 and not result.digest
    is_disturbed = case is not undisturbed and (case is not array or number == 1)
    sessions = result.output.count("epoch=4/4")
    ended = (result.state, result.code, result.restarts, result.digest, sessions)
    return ended == ("COMPLETED", "0:0", int(is_disturbed), digest, 1)


def run_cases(node: SlurmNode, folder: Path, cases: tuple[Case, ...]) -> Iterator[tuple[Case, list[Result]]]:
    """Run cases, three at a time."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        futures = [(case, pool.submit(lambda case: list(case(node, folder / case.__name__)), case)) for case in cases]
        for case, future in futures:
            yield case, future.result()
