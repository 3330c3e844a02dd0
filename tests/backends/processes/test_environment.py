"""Detection of ranks from the environment variables of launchers. No test starts a process."""

from __future__ import annotations

from typing import Any

import pytest

import trainstack as ts
from trainstack.backends.processes.environment import (
    DistributedTrainingArguments,
    ProcessInfo,
    detect_process_info,
    is_on_one_host,
    launch_help,
    launcher_world_size,
)
from trainstack.backends.processes.slurm import expand_counts, expand_hosts, port_of

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_JOB_NODELIST": "gpu[07-12]",
    "SLURM_TASKS_PER_NODE": "4(x6)",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
# The variables of a shell in an interactive job, as a real one printed them (Slurm's interactive step).
INTERACTIVE = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "gpu08",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PTY_PORT": "34889",
}
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "gpu08",
}


def place(environ: dict[str, str], **changes: str | None) -> ProcessInfo | None:
    merged: dict[str, str | None] = {**environ, **changes}
    return detect_process_info({name: value for name, value in merged.items() if value is not None})


def found(environ: dict[str, str], **changes: str | None) -> ProcessInfo:
    where = place(environ, **changes)
    assert where is not None
    return where


# --- torchrun


@pytest.mark.spec("PMT-23")
def test_torchrun_variables_are_read() -> None:
    assert place(TORCHRUN) == ProcessInfo(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        node_rank=1,
        master_addr="node01",
        master_port=29400,
        launcher="torchrun",
        restarts=2,
    )


def test_without_variables_there_is_one_process() -> None:
    assert detect_process_info({}) is None
    assert detect_process_info({"MASTER_ADDR": "node01", "MASTER_PORT": "1234", "OMP_NUM_THREADS": "1"}) is None
    assert detect_process_info({"WORLD_SIZE": "1"}) is None


def test_variables_exported_by_hand_are_read() -> None:
    one_each = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "2900"}
    assert (found(one_each).local_size, found(one_each).node_rank) == (1, 1)
    assert (found(one_each, RANK="0").local_size, found(one_each, RANK="0").node_rank) == (1, 0)
    assert found(one_each, MASTER_ADDR="127.0.0.1").local_size == 1, "the local rank differs from the rank"
    together = {**one_each, "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    assert (found(together).local_size, found(together).node_rank) == (2, 0)
    alone = found({"RANK": "0", "WORLD_SIZE": "1"})
    assert (alone.size, alone.local_rank, alone.master_addr) == (1, 0, "127.0.0.1")


PODS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "2900"}


def test_pods_have_no_local_rank() -> None:
    """E-S13: Kubeflow and SageMaker set four variables."""
    pod = found(PODS)
    assert (pod.rank, pod.local_rank, pod.local_size, pod.node_rank) == (1, 0, 1, 1)
    assert not is_on_one_host(pod, PODS)
    master = found(PODS, RANK="0", MASTER_ADDR="localhost", KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert (master.rank, master.local_rank, master.local_size) == (0, 0, 1)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_of_one_machine_need_a_local_rank(rank: str) -> None:
    with pytest.raises(
        ts.ConfigurationError, match=r"LOCAL_RANK is missing, and MASTER_ADDR=127.0.0.1 means.*0 if each"
    ):
        found(PODS, RANK=rank, MASTER_ADDR="127.0.0.1")
    with pytest.raises(ts.ConfigurationError, match="LOCAL_RANK is missing"):
        found(PODS, RANK=rank, LOCAL_WORLD_SIZE="2")


def test_the_local_executor_of_submitit_is_detected() -> None:
    """E-S14."""
    variables = {
        "SUBMITIT_LOCAL_JOB_ID": "4235",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
    }
    task = found(variables)
    assert (task.rank, task.size, task.local_rank, task.local_size, task.node_rank) == (1, 2, 1, 2, 0)
    assert (task.launcher, task.master_addr, task.master_port) == ("submitit", "127.0.0.1", port_of(4235))
    assert launcher_world_size(variables) == 2
    assert is_on_one_host(task, variables)
    assert found(TORCHRUN | variables).launcher == "torchrun"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=f"{name} is missing.*Export {name}"):
        place(TORCHRUN, **{name: None})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"RANK": "-1"}, "RANK='-1' is not an integer"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four' is not an integer"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        ({"LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"RANK": None}, "WORLD_SIZE='4' is set and RANK is not"),
        ({"RANK": None, "WORLD_SIZE": None}, "LOCAL_RANK='1' is set and RANK is not"),
    ],
)
def test_contradictions_of_torchrun_are_refused(changes: dict[str, str | None], sentence: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=sentence):
        place(TORCHRUN, **changes)


def test_torchrun_takes_precedence_over_other_launchers() -> None:
    assert found({**SLURM, **OPENMPI, **TORCHRUN}).launcher == "torchrun"


# --- SLURM


def test_slurm_variables_are_read() -> None:
    assert place(SLURM) == ProcessInfo(
        rank=5,
        size=7,
        local_rank=1,
        local_size=3,
        node_rank=1,
        master_addr="gpu08",
        master_port=15000 + 123456 % 16000,
        launcher="slurm",
    )


def test_older_and_odd_forms_of_slurm_variables_are_read() -> None:
    whole = {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": "8"}
    assert found(SLURM, **whole, SLURM_TASKS_PER_NODE="4(x2)").local_size == 4
    assert found(SLURM, **whole, SLURM_TASKS_PER_NODE=None, SLURM_NTASKS_PER_NODE="4").local_size == 4
    assert found(SLURM, **whole, SLURM_TASKS_PER_NODE=None, SLURM_NTASKS_PER_NODE="4(x2)").local_size == 4
    assert found(SLURM, SLURM_STEP_NODELIST=None, SLURM_JOB_NODELIST="a[1,3]").master_addr == "a1"
    assert found(SLURM, MASTER_ADDR="other", MASTER_PORT="1234").master_port == 1234
    assert found(SLURM, SLURM_RESTART_COUNT="3").restarts == 3


def test_one_slurm_machine_uses_the_loopback_address() -> None:
    one = found(SLURM, SLURM_STEP_TASKS_PER_NODE="7", SLURM_NODEID="0", SLURM_STEP_NODELIST="gpu08")
    assert (one.master_addr, one.local_size) == ("127.0.0.1", 7)


def test_steps_of_a_job_have_different_ports() -> None:
    ports = {found(SLURM, SLURM_STEP_ID=step).master_port for step in ("0", "1", "2")}
    assert len(ports) == 3
    assert all(15000 <= port < 31000 for port in ports)


@pytest.mark.parametrize("environ", [BATCH, INTERACTIVE, {**BATCH, "SLURM_STEP_ID": "4294967291"}])
def test_a_slurm_shell_is_one_process(environ: dict[str, str]) -> None:
    assert detect_process_info(environ) is None


def test_srun_with_a_terminal_is_one_process() -> None:
    assert place(SLURM, SLURM_PTY_PORT="3333") is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is missing"),
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID is 7 and SLURM_STEP_NUM_TASKS is 7"),
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID is 3 and the tasks of this machine is 3"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 and SLURM_STEP_NUM_TASKS=7 contradict"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,4"}, "STEP_TASKS_PER_NODE=4,4 .*has another sum"),
        ({"SLURM_STEP_TASKS_PER_NODE": "four"}, "'four' is neither '4' nor"),
        ({"SLURM_STEP_NODELIST": "gpu[8-"}, "Export MASTER_ADDR"),
        ({"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None}, "SLURM_STEP_NODELIST is missing"),
    ],
)
def test_contradictions_of_slurm_are_refused(changes: dict[str, str | None], sentence: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=sentence):
        place(SLURM, **changes)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost", ["localhost"]),
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("a1,b[08-10]-ib", ["a1", "b08-ib", "b09-ib", "b10-ib"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("x[099-101]", ["x099", "x100", "x101"]),
    ],
)
def test_lists_of_hosts_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-", "a[x]", "a,,b", "a]"])
def test_broken_lists_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the texts differ
        expand_hosts(text)


def test_counts_of_tasks_are_expanded() -> None:
    assert expand_counts("4") == [4]
    assert expand_counts("4(x2),3") == [4, 4, 3]


# --- Open MPI


def test_openmpi_on_one_machine_needs_no_address() -> None:
    where = found(OPENMPI)
    assert (where.rank, where.size, where.local_rank, where.local_size) == (1, 2, 1, 2)
    assert (where.master_addr, where.launcher, where.node_rank) == ("127.0.0.1", "openmpi", 0)
    other = found(OPENMPI, PMIX_NAMESPACE="prterun-host-4712@1")
    assert where.master_port != other.master_port
    assert found(OPENMPI, PMIX_NAMESPACE=None).master_port == 29500


def test_openmpi_on_two_machines_needs_an_address() -> None:
    two = {**OPENMPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ts.ConfigurationError, match=r"MASTER_ADDR is missing.*mpirun -x MASTER_ADDR"):
        detect_process_info(two)
    assert found(two, MASTER_ADDR="node01").master_addr == "node01"
    assert found(two, AZ_BATCH_MASTER_NODE="10.0.0.4:6000").master_addr == "10.0.0.4"
    assert found(two, AZ_BATCHAI_MPI_MASTER_NODE="10.0.0.5").master_addr == "10.0.0.5"
    both = found(two, AZ_BATCH_MASTER_NODE="10.0.0.4:6000", AZ_BATCHAI_MPI_MASTER_NODE="localhost")
    assert both.master_addr == "10.0.0.4"
    assert found(two, MASTER_ADDR="node01").node_rank == 1


def test_mpirun_takes_precedence_in_a_slurm_job() -> None:
    """mpirun starts its daemons with srun: SLURM then counts machines where Open MPI counts processes."""
    where = found({**SLURM, **OPENMPI})
    assert (where.launcher, where.rank, where.size) == ("openmpi", 1, 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"OMPI_COMM_WORLD_SIZE": None}, "OMPI_COMM_WORLD_SIZE is missing"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK is 2"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3 and OMPI_COMM_WORLD_SIZE=2 contradict"),
    ],
)
def test_contradictions_of_openmpi_are_refused(changes: dict[str, str | None], sentence: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=sentence):
        place(OPENMPI, **changes)


# --- explicit arguments


def said(**changes: Any) -> DistributedTrainingArguments:
    return DistributedTrainingArguments(**{"local_rank": 1, "global_rank": 3, "world_size": 4, **changes})


@pytest.mark.spec("PMT-23", "F119")
def test_explicit_arguments_take_precedence() -> None:
    where = detect_process_info(SLURM, said(master_addr="host", master_port=1234, local_world_size=2))
    assert where == ProcessInfo(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        node_rank=1,
        master_addr="host",
        master_port=1234,
        launcher="explicit",
    )


def test_explicit_arguments_take_the_address_from_the_environment() -> None:
    where = detect_process_info({"MASTER_ADDR": "host", "MASTER_PORT": "2900"}, said())
    assert where is not None
    assert (where.master_addr, where.master_port) == ("host", 2900)
    assert (where.local_size, where.node_rank) == (None, None)
    with pytest.raises(ts.ConfigurationError, match="MASTER_ADDR is missing"):
        detect_process_info({}, said())
    alone = detect_process_info({}, said(local_rank=0, global_rank=0, world_size=1))
    assert alone is not None
    assert (alone.master_addr, alone.local_size) == ("127.0.0.1", 1)


@pytest.mark.parametrize("port", [1, 65535])
def test_the_first_and_the_last_port_are_accepted(port: int) -> None:
    where = detect_process_info({}, said(master_addr="host", master_port=port))
    assert where is not None
    assert where.master_port == port


def test_explicit_arguments_that_contradict_a_launcher_are_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match="the arguments have 3, but the launcher set RANK=0"):
        detect_process_info({**TORCHRUN, "RANK": "0"}, said())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"global_rank": 4}, "global_rank=4: write a number from 0 to world_size - 1 = 3"),
        ({"global_rank": -1}, "global_rank=-1"),
        ({"local_rank": 4}, "local_rank=4"),
        ({"local_rank": 1, "local_world_size": 1}, "local_rank=1: .*local_world_size - 1 = 0"),
        ({"gather_frequency": 0}, "gather_frequency=0"),
        ({"master_port": 0}, "master_port=0"),
        ({"master_addr": ""}, "master_addr=''"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=sentence):
        said(**changes)


def test_how_to_launch_names_every_way() -> None:
    text = launch_help("ddp-amp")
    for part in ("backend 'ddp-amp'", "torchrun --nproc-per-node", "trainstack.launch(", "srun", "mpirun", "'sp-amp'"):
        assert part in text


# --- one process


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        (TORCHRUN, 4),
        ({"WORLD_SIZE": "4"}, 4),
        (OPENMPI, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 4),
        (SLURM, 7),
        ({**SLURM, **OPENMPI}, 2),
    ],
)
def test_one_process_among_many_is_refused_under_each_launcher(environ: dict[str, str], size: int) -> None:
    with pytest.raises(
        ts.ConfigurationError, match=rf"'sp' in a world of {size} processes: .*separate models are intended"
    ):
        ts.SingleProcess(environ=environ).open("cpu")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        INTERACTIVE,
        {**SLURM, "SLURM_PTY_PORT": "3333"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {**SLURM, "RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_one_process_runs_where_one_was_started(environ: dict[str, str]) -> None:
    assert ts.SingleProcess(environ=environ).open("cpu").size == 1


def test_an_empty_environ_allows_one_process_among_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ts.ConfigurationError, match=r"backend_options=\{'sp': \{'environ': \{\}\}\}"):
        ts.build_trainer_backend("sp-bf16").open("cpu")
    assert ts.build_trainer_backend("sp-bf16", sp={"environ": {}}).open("cpu").is_main


def test_a_world_size_other_than_a_number_is_named() -> None:
    with pytest.raises(ts.ConfigurationError, match="WORLD_SIZE='x' is not an integer"):
        ts.SingleProcess(environ={"WORLD_SIZE": "x"}).open("cpu")
