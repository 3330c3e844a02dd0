"""Layers that execute a training step, the grammar of backend strings, and the stack that a string builds."""

from typing import TYPE_CHECKING

from trainstack._lazy import lazy_imports
from trainstack.backends.amp import Amp
from trainstack.backends.apex import AmpApex
from trainstack.backends.base import VERBS, Slot, TrainerBackend, TrainerBackendArguments
from trainstack.backends.bf16 import BFloat16
from trainstack.backends.build import build_trainer_backend, explain
from trainstack.backends.ddp import DDP
from trainstack.backends.decorator import AbstractTrainerBackendDecorator
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.layer import DP
from trainstack.backends.fsdp import FSDP
from trainstack.backends.processes.borrowed import Borrowed
from trainstack.backends.processes.collectives import all_gather_with_grad
from trainstack.backends.processes.communicator import Communicator
from trainstack.backends.processes.environment import (
    DistributedTrainingArguments,
    ProcessInfo,
    detect_process_info,
    launch_help,
    process_info_of_group,
)
from trainstack.backends.processes.world import World
from trainstack.backends.single_process import SingleProcess, move_to_device
from trainstack.backends.spec import legal_specs, parse_spec, register_layer, register_trainer_backend, unregister
from trainstack.backends.workload import Clipping, Workload

if TYPE_CHECKING:
    from trainstack.backends.processes.rendezvous import rendezvous_store

__getattr__ = lazy_imports(__name__, {"rendezvous_store": "trainstack.backends.processes.rendezvous"})

__all__ = [
    "VERBS",
    "AbstractTrainerBackendDecorator",
    "Amp",
    "DDP",
    "DP",
    "FSDP",
    "DifferentialPrivacyArguments",
    "AmpApex",
    "BFloat16",
    "Borrowed",
    "Clipping",
    "Communicator",
    "DistributedTrainingArguments",
    "ProcessInfo",
    "SingleProcess",
    "Slot",
    "TrainerBackend",
    "TrainerBackendArguments",
    "Workload",
    "World",
    "all_gather_with_grad",
    "build_trainer_backend",
    "explain",
    "detect_process_info",
    "launch_help",
    "legal_specs",
    "move_to_device",
    "rendezvous_store",
    "parse_spec",
    "process_info_of_group",
    "register_layer",
    "register_trainer_backend",
    "unregister",
]
