"""The launcher that has started this process, by the environment."""

from __future__ import annotations

import os


def is_azureml_mpirun() -> bool:
    """Whether Azure ML has started this process with Open MPI."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    is_open_mpi = all(f"OMPI_COMM_WORLD_{name}" in os.environ for name in names)
    return is_open_mpi and any(name in os.environ for name in ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"))


def is_torch_distributed_launch_via_environment_variables() -> bool:
    """Whether the variables of torch's launcher are set."""
    return all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
