"""Rank, world size and rendezvous of this process, read from its launcher's environment."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from trainstack.backends.processes import slurm
from trainstack.backends.processes.variables import Variables
from trainstack.errors import ConfigurationError
from trainstack.ranks import exchange, host_identity

Launcher = Literal["torchrun", "slurm", "openmpi", "submitit", "explicit", "group"]
LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500  # also torchrun's default


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """The rank of this process and the rendezvous of the run.

    Args:
        rank: among all processes, from 0.
        size: the number of processes.
        local_rank: among the processes of this machine, from 0.
        local_size: the number of processes on this machine; None if only explicit arguments exist and lack it.
        node_rank: the number of this machine; None if `local_size` is. Open MPI does not give it; there it is an
            estimate, which is right if ranks fill one machine after the other.
        master_addr: the host on which rank 0 opens the store; "" for an existing process group.
        master_port: its port; 0 for an existing process group.
        launcher: the source of these values.
        restarts: the number of restarts of this run by the launcher.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    node_rank: int | None
    master_addr: str
    master_port: int
    launcher: Launcher
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class DistributedTrainingArguments:
    """The rank of this process, set explicitly. It takes precedence over the variables of a launcher.

    Args:
        local_rank: among the processes of this machine, from 0.
        global_rank: among all processes, from 0.
        world_size: the number of processes.
        gather_frequency: samples gathered at a time during evaluation; None gathers everything at once.
        master_addr: the host of rank 0; None uses MASTER_ADDR, or the loopback device in a world of one.
        master_port: a free port there; None uses MASTER_PORT, or torchrun's default in a world of one.
        backend: `"gloo"`, `"nccl"` or another backend of `torch.distributed`; None follows the device.
        timeout_s: seconds after which a collective fails that some process has not joined.
        rendezvous_timeout_s: seconds in which all processes have to reach the first use of their trainer; None is 600,
            or `timeout_s` if that is shorter.
        run_id: a name that all processes of a run share. The rendezvous refuses a process with another name.
        local_world_size: processes on this machine; None uses LOCAL_WORLD_SIZE.
        allow_pickle: whether outputs and inputs of metrics may contain objects of any class, which processes send each
            other as pickles. Loading a pickle can execute any code, so every process that can reach the ports of the
            run is trusted. Under a launcher write `backend_options={"ddp": {"allow_pickle": True}}` instead.
        init_method: an argument of PyMarlin. Only `"env://"` is accepted.

    Raises:
        ConfigurationError: a value is out of its range, or `init_method` is not `"env://"`.
    """

    local_rank: int = 0
    global_rank: int = 0
    world_size: int = 1
    gather_frequency: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    backend: str | None = None
    timeout_s: float = 1800.0
    rendezvous_timeout_s: float | None = None
    run_id: str | None = None
    local_world_size: int | None = None
    allow_pickle: bool = False
    init_method: str = "env://"

    def __post_init__(self) -> None:
        _check_init_method(self)
        _check(self.world_size >= 1, f"world_size={self.world_size}: write a number of at least 1.")
        _check_rank("global_rank", self.global_rank, "world_size", self.world_size)
        limit = "world_size" if self.local_world_size is None else "local_world_size"
        _check_rank("local_rank", self.local_rank, limit, self.local_world_size or self.world_size)
        _check(
            self.local_world_size is None or 1 <= self.local_world_size <= self.world_size,
            f"local_world_size={self.local_world_size}: write a number from 1 to world_size={self.world_size}.",
        )
        _check(
            self.gather_frequency is None or self.gather_frequency >= 1,
            f"gather_frequency={self.gather_frequency}: write a number of samples, or None for all at once.",
        )
        _check(
            self.master_port is None or 1 <= self.master_port <= 65535,
            f"master_port={self.master_port}: a port is a number from 1 to 65535.",
        )
        _check(self.master_addr != "", "master_addr='': write the host of rank 0, or None to take MASTER_ADDR.")
        for name in ("timeout_s", "rendezvous_timeout_s"):
            seconds = getattr(self, name)
            _check(seconds is None or seconds > 0, f"{name}={seconds}: write a number of seconds above 0.")


def detect_process_info(
    environ: Mapping[str, str] | None = None, explicit: DistributedTrainingArguments | None = None
) -> ProcessInfo | None:
    """The rank, world size and rendezvous from the environment; None if no launcher started this process.

    Explicit arguments come first, then the variables of torchrun, Open MPI, submitit's local executor and SLURM. Open
    MPI precedes SLURM because `mpirun` inside a SLURM job sets both, and SLURM then counts mpirun's daemons. A SLURM
    allocation whose tasks `srun` did not start does not count as a launcher.

    Args:
        environ: the variables; by default those of the process.
        explicit: arguments that replace the variables.

    Raises:
        ConfigurationError: variables are missing, are not numbers, or contradict each other.
    """
    found = os.environ if environ is None else environ
    if explicit is not None:
        return _explicit_info(explicit, Variables(found, "the arguments given"))
    if found.get("RANK"):
        return _torchrun_info(Variables(found, "torchrun"))
    if found.get("OMPI_COMM_WORLD_RANK"):
        return _openmpi_info(Variables(found, "Open MPI"))
    if found.get("SUBMITIT_LOCAL_GLOBALID"):
        return _submitit_info(Variables(found, "submitit's local executor"))
    if slurm.started_by_srun(found):
        return _slurm_info(Variables(found, "srun"))
    for name, alone in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        if (found.get(name) or alone) != alone:
            raise ConfigurationError(
                f"{name}={found[name]!r} is set and RANK is not, so the variables of a launcher are incomplete. "
                f"Export RANK too, or unset {name} to run one process."
            )
    return None


def is_on_one_host(place: ProcessInfo, environ: Mapping[str, str]) -> bool:
    """Whether the launcher's variables show that all processes are on this host.

    Variables that were exported by hand show it only with LOCAL_WORLD_SIZE: in some clusters MASTER_ADDR is localhost
    for rank 0 alone.
    """
    said = place.launcher != "torchrun" or bool(environ.get("LOCAL_WORLD_SIZE"))
    return place.size == 1 or (said and place.local_size == place.size)


def launcher_world_size(environ: Mapping[str, str]) -> int:
    """The number of processes that the launcher of this one started; 1 without a launcher.

    It reads fewer variables than `detect_process_info`.

    Raises:
        ConfigurationError: the variable with the number is missing or not a number.
    """
    if not environ.get("RANK") and environ.get("OMPI_COMM_WORLD_RANK"):
        return Variables(environ, "Open MPI").number("OMPI_COMM_WORLD_SIZE")
    if not environ.get("RANK") and environ.get("SUBMITIT_LOCAL_GLOBALID"):
        return Variables(environ, "submitit's local executor").number("SUBMITIT_LOCAL_NTASKS")
    if not environ.get("RANK") and slurm.started_by_srun(environ):
        variables = Variables(environ, "srun")
        return variables.number(_slurm_size_name(variables))
    return Variables(environ, "torchrun").number("WORLD_SIZE", default=1)


def process_info_of_group(timeout_s: float = 600.0) -> ProcessInfo:
    """The rank, world size and machine of this process in an existing process group, made by any code.

    Every process of the group has to call it: they exchange their hosts through the group's store. LOCAL_RANK is used
    if all processes of this machine have different values in its range.

    Args:
        timeout_s: seconds to wait for the other processes.

    Raises:
        TrainstackError: a process has not called it within `timeout_s`.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = f"{host_identity()}|{os.environ.get('LOCAL_RANK', '')}"
    places = [text.rpartition("|") for text in exchange("place", mine, timeout_s=timeout_s)]
    machines = [machine for machine, _, _ in places]
    mates = [other for other in range(size) if machines[other] == machines[rank]]
    numbers = [places[mate][2] for mate in mates]
    trusted = sorted(numbers) == sorted(map(str, range(len(mates))))
    return ProcessInfo(
        rank=rank,
        size=size,
        local_rank=int(places[rank][2]) if trusted else mates.index(rank),
        local_size=len(mates),
        node_rank=list(dict.fromkeys(machines)).index(machines[rank]),
        master_addr="",
        master_port=0,
        launcher="group",
        restarts=Variables(os.environ, "torchrun").number("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def launch_help(backend: str) -> str:
    """The error message for a backend of several processes that no launcher started.

    Args:
        backend: the backend string.
    """
    return (
        f"backend {backend!r} joins several processes, and no launcher has started this one: neither torchrun's "
        "variables (RANK, WORLD_SIZE, ...) nor those of srun or mpirun are set. Start it in one of these ways:\n"
        "  torchrun --nproc-per-node=4 train.py                 on this machine\n"
        "  trainstack.launch(train, nproc=4)                    from a script or a notebook\n"
        "  srun --ntasks-per-node=4 python train.py             in a SLURM job\n"
        "  mpirun -np 4 python train.py                         with Open MPI\n"
        f"Or train in this one process with backend {'-'.join(['sp', *backend.split('-')[1:]])!r}."
    )


def _check_init_method(args: DistributedTrainingArguments) -> None:
    _check(
        args.init_method == "env://",
        f"init_method={args.init_method!r}: the processes meet at master_addr and master_port, or at the variables "
        "MASTER_ADDR and MASTER_PORT. Write these, and remove init_method.",
    )


def _explicit_info(args: DistributedTrainingArguments, variables: Variables) -> ProcessInfo:
    for name, value in (("RANK", args.global_rank), ("WORLD_SIZE", args.world_size), ("LOCAL_RANK", args.local_rank)):
        if variables.number(name, default=value) != value:
            raise ConfigurationError(
                f"the arguments have {value}, but the launcher set {name}={variables.text(name)}. "
                "Remove DistributedTrainingArguments under a launcher, or unset its variables."
            )
    alone = args.world_size == 1
    known_size = args.local_world_size or variables.number("LOCAL_WORLD_SIZE", default=0)
    local_size = 1 if alone else known_size or None
    # Ranks fill one machine after the other. Without the number on each machine, only the first machine is known.
    node_rank = args.global_rank // local_size if local_size else None
    return ProcessInfo(
        rank=args.global_rank,
        size=args.world_size,
        local_rank=args.local_rank,
        local_size=local_size,
        node_rank=0 if node_rank is None and args.global_rank == args.local_rank else node_rank,
        master_addr=args.master_addr or variables.text("MASTER_ADDR", default=LOOPBACK if alone else None),
        master_port=args.master_port or variables.port("MASTER_PORT", default=_DEFAULT_PORT if alone else None),
        launcher="explicit",
        restarts=variables.number("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _torchrun_info(variables: Variables) -> ProcessInfo:
    """torchrun, `launch`, Ray, Kubeflow and scripts that export torch's `env://` variables."""
    rank, size = variables.rank("RANK", "WORLD_SIZE")
    alone = size == 1
    in_pod = not alone and _is_alone_on_host(variables)
    local_rank = variables.number("LOCAL_RANK", default=0 if alone or in_pod else None)
    local_size = variables.number("LOCAL_WORLD_SIZE", default=1 if in_pod else 0)
    if not local_size:  # exported by hand: one process on each machine, or all on one
        local_size = size if local_rank == rank and variables.is_loopback("MASTER_ADDR") else 1
        local_size = max(local_size, local_rank + 1)
    variables.check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    variables.check_rank("LOCAL_WORLD_SIZE", local_size - 1, "WORLD_SIZE", size)
    return ProcessInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=variables.number("GROUP_RANK", default=rank // local_size),
        master_addr=variables.text("MASTER_ADDR", default=LOOPBACK if alone else None),
        master_port=variables.port("MASTER_PORT", default=_DEFAULT_PORT if alone else None),
        launcher="torchrun",
        restarts=variables.number("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _is_alone_on_host(variables: Variables) -> bool:
    """Whether variables without LOCAL_RANK belong to a pod, in which one process runs.

    Kubeflow and SageMaker set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only. MASTER_ADDR may be localhost in the
    pod of rank 0. Outside a pod localhost means that all processes are on this machine, so their local ranks differ.

    Raises:
        ConfigurationError: the processes are on one machine, and each needs a local rank.
    """
    if variables.has("LOCAL_RANK") or variables.has("LOCAL_WORLD_SIZE"):
        return False
    if variables.has("KUBERNETES_SERVICE_HOST") or not variables.is_loopback("MASTER_ADDR"):
        return variables.has("MASTER_ADDR")
    raise ConfigurationError(
        f"LOCAL_RANK is missing, and MASTER_ADDR={variables.text('MASTER_ADDR')} means that all processes are on this "
        "machine. Export LOCAL_RANK, the number of the process on its machine (0 if each process has its own machine "
        "or pod), or start with torchrun or trainstack.launch."
    )


def _submitit_info(variables: Variables) -> ProcessInfo:
    """The variables of submitit's local executor. Its SLURM executor uses srun."""
    rank, size = variables.rank("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS")
    return ProcessInfo(
        rank=rank,
        size=size,
        local_rank=variables.number("SUBMITIT_LOCAL_LOCALID", default=rank),
        local_size=size,
        node_rank=0,
        master_addr=variables.text("MASTER_ADDR", default=LOOPBACK),
        master_port=variables.port(
            "MASTER_PORT", default=slurm.port_of(variables.number("SUBMITIT_LOCAL_JOB_ID", default=0))
        ),
        launcher="submitit",
    )


def _openmpi_info(variables: Variables) -> ProcessInfo:
    rank, size = variables.rank("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local_rank, local_size = variables.rank("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    variables.check_same("WORLD_SIZE", size, "OMPI_COMM_WORLD_SIZE")
    alone = LOOPBACK if local_size == size else None
    one_node = variables.text("AZ_BATCHAI_MPI_MASTER_NODE", default="")  # Azure ML sets it for jobs on one machine
    azure, _, _ = variables.text("AZ_BATCH_MASTER_NODE", default=one_node).partition(":")  # "10.0.0.4:6000"
    # All processes of one mpirun share its name, from which the port is derived: two runs on a machine use two ports.
    name = variables.text("PMIX_NAMESPACE", default=variables.text("OMPI_MCA_ess_base_jobid", default=""))
    port = slurm.port_of(zlib.crc32(name.encode())) if name else _DEFAULT_PORT
    return ProcessInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=rank // local_size,
        master_addr=variables.text(
            "MASTER_ADDR",
            default=azure or alone,
            remedy="Give the host of rank 0: mpirun -x MASTER_ADDR=$(hostname) if rank 0 is on this machine.",
        ),
        master_port=variables.port("MASTER_PORT", default=port),
        launcher="openmpi",
    )


def _slurm_info(variables: Variables) -> ProcessInfo:
    size_name = _slurm_size_name(variables)
    rank, size = variables.rank("SLURM_PROCID", size_name)
    variables.check_same("WORLD_SIZE", size, size_name)
    node_rank = variables.number("SLURM_NODEID")
    local_rank = variables.number("SLURM_LOCALID")
    tasks = slurm.tasks_of_nodes(variables, size, size_name)
    variables.check_rank("SLURM_NODEID", node_rank, "the number of machines", len(tasks))
    variables.check_rank("SLURM_LOCALID", local_rank, "the tasks of this machine", tasks[node_rank])
    job, step = variables.number("SLURM_JOB_ID", default=0), variables.number("SLURM_STEP_ID", default=0)
    return ProcessInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=tasks[node_rank],
        node_rank=node_rank,
        master_addr=variables.text("MASTER_ADDR", default=LOOPBACK if len(tasks) == 1 else slurm.first_host(variables)),
        # 7919 is a prime, so that the steps of neighbouring jobs rarely get the same port
        master_port=variables.port("MASTER_PORT", default=slurm.port_of(job + 7919 * step)),
        launcher="slurm",
        restarts=variables.number("SLURM_RESTART_COUNT", default=0),
    )


def _slurm_size_name(variables: Variables) -> str:
    return "SLURM_STEP_NUM_TASKS" if variables.has("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigurationError(otherwise)


def _check_rank(name: str, rank: int, limit: str, size: int) -> None:
    _check(0 <= rank < size, f"{name}={rank}: write a number from 0 to {limit} - 1 = {size - 1}.")
