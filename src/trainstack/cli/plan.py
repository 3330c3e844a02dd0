"""`trainstack plan` prints the step arithmetic of a run without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trainstack.backends.spec import parse_spec, registered_backend
from trainstack.cli.main import Parser
from trainstack.cli.memory import plan_of_target
from trainstack.cli.options import Inputs
from trainstack.cli.printing import print_json, print_lines
from trainstack.cli.target import load_target, report_user_errors
from trainstack.errors import ConfigurationError
from trainstack.trainer import TrainerArguments, TrainingPlan
from trainstack.trainer.core.intervals import whole_steps
from trainstack.trainer.reporting.setup_rows import describe_validations
from trainstack.trainer.tracking.progress import format_plan_table

_ABOUT = (
    "Print how a global batch is split, how many steps a run has, and when it validates and saves. The options are "
    "those of `trainstack train`, the file given by --config and the environment variables included. With a target, "
    "FILE.py:MODULE, it also prints the memory that one process needs. The module is built on the meta device, so "
    "nothing is allocated and no process has to be started."
)


def run(command: str, words: Sequence[str]) -> int:
    """Print the plan. Returns the exit code."""
    target = words[0] if words and not words[0].startswith("-") and ":" in words[0] else None
    with report_user_errors():
        made_by = None if target is None else load_target(target)
    return _run(target, made_by, words if target is None else words[1:])


def _run(target: str | None, made_by: Callable[..., Any] | None, words: Sequence[str]) -> int:
    inputs = Inputs(_make_parser(made_by), made_by)
    given = inputs.read(words)
    for name in ("samples", "processes", "parameters", "shards"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ConfigurationError(f"--{name} {getattr(given, name)}: write a whole number, 1 or more.")
    arguments = inputs.arguments()
    rows: list[tuple[str, str]] = []
    found: dict[str, Any] = {}
    plan = None
    if given.samples is not None:
        plan = _plan(arguments, given.samples, given.processes, given.drop_last)
        validations = describe_validations(arguments.validate_every, plan) or "never"
        saves = _saves(arguments, plan)
        private = _private_rows(arguments, plan, given.samples, given.parameters)
        rows = [*plan.rows(), *private, ("validations", validations), ("checkpoints", saves)]
        found = {**plan.to_dict(), "validations": validations, "saves": saves}
        found |= {label.replace(" ", "_"): value for label, value in private}
    if target is not None and made_by is not None:
        with report_user_errors():
            memory = plan_of_target(made_by, inputs.parameters(target), arguments, plan, given)
        rows += [(f"memory: {label}", value) for label, value in memory.rows()]
        found["memory"] = memory.to_dict()
    if given.json:
        print_json(found)
    else:
        print_lines(format_plan_table(rows))
    return 0


def make_parser(command: str) -> Parser:
    """The parser of the command without a target."""
    parser = _make_parser(None)
    Inputs(parser).show_all()
    return parser


def _make_parser(made_by: Callable[..., Any] | None) -> Parser:
    usage = "%(prog)s [FILE.py:MODULE] [--OPTION VALUE ...]"
    parser = Parser(prog="trainstack plan", description=_ABOUT, usage=usage)
    parser.add_argument("--samples", type=int, required=made_by is None, metavar="N", help="in the training data set")
    parser.add_argument(
        "--processes", "--world", type=int, default=1, metavar="N", help="that train together (default: 1)"
    )
    parser.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="processes that share one copy of the parameters, where a layer divides them (default: all)",
    )
    parser.add_argument(
        "--activations",
        action="store_true",
        help="run a forward pass of the module's first micro-batch without values, for the memory that it keeps",
    )
    parser.add_argument(
        "--parameters",
        type=int,
        metavar="P",
        help="that are trained: for the signal-to-noise ratio of private training",
    )
    parser.add_argument("--drop_last", action="store_true", help="drop a last batch that is not full")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _is_private(arguments: TrainerArguments) -> bool:
    if registered_backend(arguments.backend) is not None:  # a function makes it
        return arguments.differential_privacy_args is not None
    return any(record.layer.private for record in parse_spec(arguments.resolved_backend))


def _private_rows(
    arguments: TrainerArguments, plan: TrainingPlan, samples: int, parameters: int | None
) -> list[tuple[str, str]]:
    """The noise of a private run, and whether its batch is large enough for so many parameters."""
    if not plan.is_sampled or arguments.differential_privacy_args is None or not plan.total_steps:
        return []
    from trainstack.backends.dp import plan_privacy
    from trainstack.backends.dp.batch_advice import advice_rows

    privacy = plan_privacy(
        arguments.differential_privacy_args,
        expected_batch_size=plan.global_batch,
        dataset_size=samples,
        steps=plan.total_steps,
    )
    ratio = "--parameters P, of the model, gives the signal-to-noise ratio"
    rows = [("signal to noise", ratio)] if parameters is None else advice_rows(privacy, parameters)
    return [("noise multiplier", f"{privacy.noise_multiplier:.4g}"), *rows]


def _plan(arguments: TrainerArguments, samples: int, processes: int, drop_last: bool) -> TrainingPlan:
    batch = arguments.global_batch_size(processes)
    if drop_last and batch > samples:
        raise ConfigurationError(
            f"train_batch_size={batch} with --drop_last and {samples} samples leaves no global step. Write a smaller "
            "batch, or remove --drop_last."
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
        is_sampled=_is_private(arguments),
    )


def _saves(arguments: TrainerArguments, plan: TrainingPlan) -> str:
    saving = arguments.checkpointer_args
    if not saving.checkpoint:
        return "never"
    text = _epochs(saving.epochs_between, "at the end of")
    if saving.every_n_steps is not None:
        text += f", and after each {_steps(whole_steps('checkpointer_args.every_n_steps', saving.every_n_steps, plan))}"
    if saving.every_n_seconds is not None:
        text += f", and after each {saving.every_n_seconds:g} seconds"
    total = plan.total_steps
    return text if not total or not plan.epochs else f"{text}; the last after step {math.ceil(total)}"


def _epochs(number: int, when: str) -> str:
    return f"{when} each epoch" if number == 1 else f"{when} each {number} epochs"


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"
