"""`trainstack validate`, `test` and `predict` evaluate the weights of a run, a checkpoint or an export."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainstack.backends.spec import expand_auto, parse_spec, registered_backend
from trainstack.checkpointing.verification import open_checkpoint
from trainstack.cli.checkpoint_contents import located
from trainstack.cli.main import COMMANDS, Parser
from trainstack.cli.options import Inputs
from trainstack.cli.predictions import check_output, write_predictions
from trainstack.cli.printing import FAILED, print_json, print_lines, print_traceback
from trainstack.cli.target import UserCodeError, load_targets, report_user_errors
from trainstack.cli.train import split_target
from trainstack.errors import ConfigurationError
from trainstack.trainer import Trainer, TrainerArguments, seed_everything
from trainstack.trainer.plain_arguments import read_config
from trainstack.trainer.run_files import CONFIG
from trainstack.trainer.run_record import read_record
from trainstack.trainer.tracking.progress import format_plan_table

_MOST_USED = frozenset(
    {"val_batch_size", "max_val_steps_per_epoch", "backend", "device", "compile", "seed", "resume", "init_weights_from"}
)
_OF_TRAINING = frozenset(
    {"resume", "resume_mode", "strict_resume", "init_weights_from", "init_weights_strict", "overwrite"}
    | {"reset_optimizers_schedulers", "output_dir", "local_dir", "target"}
)
"""Keys in the `config.yaml` of a run that say how its training began."""
_STEPS = {"validate": "val", "test": "test"}
_ABOUT = (
    " PATH is the folder of a run (its last checkpoint, or the best one with --resume best), a checkpoint, a file best "
    "or last, or an export. The arguments of its run, in {config}, are the defaults of the options. Nothing is written "
    "into the run. Without PATH, --resume and --init_weights_from name the weights, or the module has them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The weights that PATH names.

    Attributes:
        path: as it was given; None without one.
        folder: the run that they belong to; None if it is not known.
        chosen: arguments that load them.
        step: the global step of an export.
    """

    path: str | None = None
    folder: Path | None = None
    chosen: Mapping[str, Any] | None = None
    step: int | None = None

    @classmethod
    def find(cls, given: str | None) -> _Weights:
        """The weights at `given`.

        Raises:
            CheckpointError: there is no run, checkpoint or export.
        """
        if given is None:
            return cls()
        if Path(given).is_dir() and read_record(Path(given)) is not None:
            return cls(path=given, folder=Path(given))
        root, content = open_checkpoint(located(given))
        folder = next((one for one in list(root.parents)[:2] if read_record(one) is not None), None)
        if content.kind == "model":
            chosen = {"init_weights_from": str(root), "init_weights_strict": True}
            return cls(path=given, folder=folder, chosen=chosen, step=content.global_step)
        return cls(path=given, folder=folder, chosen={"resume": str(root)})

    def defaults(self) -> tuple[dict[str, Any], str]:
        """The arguments of the run, for an evaluation in this process, and the name of their file."""
        file = None if self.folder is None else self.folder / CONFIG
        if file is None or not file.is_file():
            return {}, ""
        values = {name: value for name, value in read_config(file).items() if name not in _OF_TRAINING}
        return _for_this_process(values), str(file)

    def applied_to(self, args: TrainerArguments) -> TrainerArguments:
        """`args` with these weights.

        Raises:
            ConfigurationError: `args` name other weights.
        """
        if self.path is None:
            return args
        chosen = self.chosen
        if chosen is None and args.init_weights_from is None:
            chosen = {"resume": "last" if isinstance(args.resume, bool) or args.resume == "auto" else args.resume}
        elif chosen is None or args.resume is not False or args.init_weights_from is not None:
            raise ConfigurationError(
                f"{self.path} names the weights, and so does --resume or --init_weights_from. Remove one of them."
            )
        return replace(args, output_dir=self.folder, **chosen)


def _for_this_process(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a run on several processes for this one, unless a launcher has started it."""
    backend, options = values.get("backend", "auto"), values.get("backend_options", {})
    is_wrong = not isinstance(backend, str) or not isinstance(options, dict)  # which `Inputs` reports
    if is_wrong or registered_backend(backend) is not None or expand_auto("auto") != "sp":
        return values
    layers = [one for one in parse_spec(backend) if not one.layer.joins_processes and one.token != "sp"]
    tokens = ["sp", *(one.token for one in layers)]
    options = {name: one for name, one in options.items() if name.replace("_", "-") in tokens}
    return {**values, "backend": "-".join(tokens), "backend_options": options, "distributed_training_args": None}


def run(command: str, words: Sequence[str]) -> int:
    """Evaluate. Returns the exit code."""
    target, options = split_target(command, words)
    path = options.pop(0) if options and not options[0].startswith("-") else None
    try:
        _run(command, target, path, options)
    except UserCodeError as error:
        print_traceback(error.__cause__)
        return FAILED
    return 0


def make_parser(command: str) -> Parser:
    """The parser of the command without a target."""
    parser = _make_parser(command, None)
    Inputs(parser, most_used=_MOST_USED).show_all()
    return parser


def _make_parser(command: str, target: str | None) -> Parser:
    about = COMMANDS[command]
    parser = Parser(
        prog=f"trainstack {command} {target or 'FILE.py:MODULE'}",
        description=f"{about[0].upper()}{about[1:]}.{_ABOUT.format(config=CONFIG)}",
        usage="%(prog)s [PATH] [--OPTION VALUE ...]",
    )
    if command == "predict":
        data = "test, val, or FILE.py:NAME, a function that returns a data set, a loader or a dict of these"
        parser.add_argument("--data", metavar="DATA", default="test", help=f"{data} (default: %(default)s)")
        output = "FILE.pt for torch.load, FILE.npz for numpy.load, or FILE.jsonl with one line for each sample"
        parser.add_argument(
            "--output",
            metavar="FILE",
            type=Path,
            default=Path("predictions.pt"),
            help=f"{output} (default: %(default)s)",
        )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(command: str, target: str | None, path: str | None, options: list[str]) -> None:
    data = _data_of(options) if command == "predict" else None
    with report_user_errors():
        makers = [] if target is None else load_targets(target, *([] if data is None else [data]))
    inputs = Inputs(_make_parser(command, target), makers[0] if makers else None, _MOST_USED)
    weights = _Weights.find(path)
    given = inputs.read(options, defaults=weights.defaults())
    assert target is not None  # --help, the one option without a target, has ended the process
    arguments = weights.applied_to(inputs.arguments())
    if command == "predict":
        check_output(given.output)
    seed_everything(arguments.seed)
    with report_user_errors():
        trainer = Trainer(makers[0](**inputs.parameters(target)), arguments)
        if command == "predict":
            written = write_predictions(trainer, given.data, None if data is None else makers[1], given.output)
            rows, found = _as_rows(written), written
        else:
            found = {"metrics": _metrics(trainer, command)}
            rows = [(name, _as_text(value)) for name, value in found["metrics"].items()]
    if trainer.is_main_process:
        step = trainer.state.global_step if weights.step is None else weights.step
        _show(given, weights, arguments, step, rows, found)


def _data_of(options: Sequence[str]) -> str | None:
    """The function that `--data` names; None for the data of the module."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data", default="test")
    data: str = parser.parse_known_args(list(options))[0].data
    if data in ("test", "val"):
        return None
    if ":" not in data:
        raise ConfigurationError(f"--data {data}: write test, val, or FILE.py:NAME with the name of a function.")
    return data


def _metrics(trainer: Trainer, command: str) -> dict[str, Any]:
    evaluate: Callable[..., Any] = getattr(trainer, command)
    found = evaluate(keep_outputs=False)
    if not found.metrics:
        step, name = _STEPS[command], type(trainer.module).__name__
        raise ConfigurationError(
            f"{name} has recorded no metric of {command}. Define get_{step}_dataloaders(self, sampler, batch_size), "
            f"and return the loss from {step}_step or give the module metrics."
        )
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.metrics.items()}


def _as_rows(written: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in written.items()]


def _as_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _show(
    given: argparse.Namespace,
    weights: _Weights,
    arguments: TrainerArguments,
    step: int,
    rows: list[tuple[str, str]],
    found: dict[str, Any],
) -> None:
    resumed = None if arguments.resume is False else str(arguments.resume)
    initial = None if arguments.init_weights_from is None else str(arguments.init_weights_from)
    path = weights.path or resumed or initial
    if given.json:
        print_json({"weights": path, "global_step": step, **found})
        return
    shown = "those that the module was made with" if path is None else f"{path}, global step {step}"
    print_lines(format_plan_table([("weights", shown), *rows]))
