"""`trainstack plan` prints the step arithmetic of a run without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainstack.cli.main import Parser
from trainstack.cli.options import Inputs
from trainstack.cli.printing import print_json, print_line
from trainstack.errors import ConfigurationError
from trainstack.trainer import Every, TrainerArguments, TrainingPlan
from trainstack.trainer.core.intervals import whole_steps

_ABOUT = (
    "Print how a global batch is split, how many steps a run has, and when it validates and saves. The options are "
    "those of `trainstack train`, the file given by --config and the environment variables included."
)


def add(subparsers: Any) -> None:
    """Name the command in the list of them; `run` reads the words behind it."""
    subparsers.add_parser("plan", help=_ABOUT, add_help=False)


def run(words: Sequence[str]) -> int:
    """Print the plan. Returns the exit code."""
    parser = Parser(prog="trainstack plan", description=_ABOUT, usage="%(prog)s [--OPTION VALUE ...]")
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="in the training data set")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that train together (default: 1)")
    parser.add_argument("--drop_last", action="store_true", help="leave out a last batch that is not full")
    parser.add_argument("--json", action="store_true", help="print JSON")
    inputs = Inputs(parser)
    given = inputs.read(words)
    for name in ("samples", "processes"):
        if getattr(given, name) < 1:
            raise ConfigurationError(f"--{name} {getattr(given, name)}: write a whole number, 1 or more.")
    arguments = inputs.arguments()
    plan = _plan(arguments, given.samples, given.processes, given.drop_last)
    validations, saves = _validations(arguments, plan), _saves(arguments, plan)
    if given.json:
        print_json({**plan.to_dict(), "total_steps": plan.total_steps, "validations": validations, "saves": saves})
    else:
        for label, value in [*plan.rows(), ("validations", validations), ("checkpoints", saves)]:
            print_line(f"{label:<22} {value}")
    return 0


def _plan(arguments: TrainerArguments, samples: int, processes: int, drop_last: bool) -> TrainingPlan:
    batch = arguments.global_batch_size(processes)
    if drop_last and batch > samples:
        raise ConfigurationError(
            f"train_batch_size={batch} with --drop_last and {samples} samples leaves no global step. Write a smaller "
            "batch, or leave --drop_last out."
        )
    if arguments.epochs == 0 and arguments.max_steps is None:
        raise ConfigurationError("epochs=0: there is nothing to train. Write 1 or more.")
    return TrainingPlan.make(
        train_batch_size=batch,
        gpu_batch_size_limit=arguments.gpu_batch_size_limit,
        world_size=processes,
        epochs=arguments.epochs,
        dataset_length=samples,
        drop_last=drop_last,
        max_steps_per_epoch=arguments.max_train_steps_per_epoch,
        max_steps=arguments.max_steps,
    )


def _validations(arguments: TrainerArguments, plan: TrainingPlan) -> str:
    every = arguments.validate_every
    if isinstance(every, Every):
        every = -every.epochs if every.epochs else every.steps
    if every is None or (isinstance(every, int) and every < 0):
        return _epochs(1 if every is None else -every, "after")
    if every == 0 or callable(every):
        return "never"
    return f"after each {_steps(whole_steps('validate_every', every, plan))}"


def _saves(arguments: TrainerArguments, plan: TrainingPlan) -> str:
    saving = arguments.checkpointer_args
    if not saving.checkpoint:
        return "never"
    text = _epochs(saving.epochs_between, "at the end of")
    if saving.every_n_steps is not None:
        text += f", and after each {_steps(whole_steps('checkpointer_args.every_n_steps', saving.every_n_steps, plan))}"
    total = plan.total_steps
    return text if not total or not plan.epochs else f"{text}; the last after step {math.ceil(total)}"


def _epochs(number: int, when: str) -> str:
    return f"{when} each epoch" if number == 1 else f"{when} each {number} epochs"


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"
