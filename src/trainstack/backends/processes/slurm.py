"""SLURM's environment variables: host lists, tasks of each node, detection of srun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainstack.backends.processes.variables import Variables
from trainstack.errors import ConfigurationError

# Step ids of a job without srun: the batch script, the shell of an interactive job, and others (`SLURM_BATCH_SCRIPT`,
# `SLURM_INTERACTIVE_STEP`, ... in slurm.h are the highest 32-bit numbers).
_STEPS_OF_NO_WORLD = range(4_294_967_280, 4_294_967_296)

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_HOSTS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # one item of a list: brackets may hold commas
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task, as opposed to a batch script or an interactive shell.

    Only srun sets the variables of a step; a batch script has SLURM_PROCID and SLURM_NTASKS too. Programs in a shell of
    `srun --pty` are not tasks, for any number of tasks.
    """
    if not environ.get("SLURM_PROCID"):
        return False
    if not (environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_STEP_NODELIST")):
        return False
    if environ.get("SLURM_PTY_PORT") or environ.get("SLURM_PTY_WIN_COL"):
        return False
    step = environ.get("SLURM_STEP_ID", "0")
    return not (step.isdecimal() and int(step) in _STEPS_OF_NO_WORLD)


def port_of(number: int) -> int:
    """A port from 15000 to 30999, a function of `number`; below the ports that systems assign to clients."""
    return 15000 + number % 16000


def expand_counts(text: str) -> list[int]:
    """`"4(x2),3"` -> `[4, 4, 3]`: the tasks of each machine.

    Raises:
        ValueError: `text` does not have the form that SLURM writes.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"{item!r} is neither '4' nor '4(x2)'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """`"node[01-03,7],gpu5"` -> `["node01", "node02", "node03", "node7", "gpu5"]`.

    Raises:
        ValueError: `text` does not have the form that SLURM writes.
    """
    items = _HOSTS.findall(text)
    if not items or ",".join(items) != text:
        raise ValueError(f"{text!r} is not a list such as 'node[01-03,7],gpu5'")
    return [host for item in items for host in _expand_item(item.strip())]


def _expand_item(item: str) -> list[str]:
    group = _GROUP.search(item)
    if group is None:
        return [item]
    numbers: list[str] = []
    for part in group[1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} in {item!r} is neither '7' nor '01-03'")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    before, after = item[: group.start()], item[group.end() :]
    return [before + number + rest for number in numbers for rest in _expand_item(after)]


def first_host(variables: Variables) -> str:
    """The machine of rank 0: the first in the list of the step."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if variables.has(name)), names[0])
    text = variables.text(name, remedy="Export MASTER_ADDR, the host of rank 0.")
    try:
        return expand_hosts(text)[0]
    except (ValueError, IndexError) as error:
        raise ConfigurationError(f"{name}={text!r}: {error}. Export MASTER_ADDR, the host of rank 0.") from error


def tasks_of_nodes(variables: Variables, size: int, size_name: str) -> list[int]:
    """The number of tasks of the step on each of its machines; their sum is `size`.

    The variables of the whole job are used only if they have this sum, because a step may be smaller than its job.
    """
    said = []
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if not variables.has(name):
            continue
        text = variables.text(name)
        try:
            counts = expand_counts(text)
        except ValueError as error:
            raise ConfigurationError(f"{name}={text!r}: {error}.") from error
        if name == "SLURM_NTASKS_PER_NODE" and len(counts) == 1 and counts[0] and size % counts[0] == 0:
            counts *= size // counts[0]  # this variable is the option of srun, one number for all machines
        if sum(counts) == size:
            return counts
        said.append(f"{name}={text}")
    if variables.number("SLURM_STEP_NUM_NODES", default=variables.number("SLURM_NNODES", default=0)) == 1:
        return [size]
    raise ConfigurationError(
        f"{size_name}={size}, but {' and '.join(said) or 'SLURM_STEP_TASKS_PER_NODE, which is missing,'} has another "
        "sum, so the tasks of this machine cannot be counted. Start with: srun --ntasks-per-node=N python train.py"
    )
