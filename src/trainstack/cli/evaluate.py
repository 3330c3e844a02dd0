"""`trainstack validate`, `test` and `predict` evaluate the weights of a run, a checkpoint or an export."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainstack.backends.spec import expand_auto, parse_spec, registered_backend
from trainstack.checkpointing.directory import scan
from trainstack.checkpointing.integrity.lineage import Ancestor
from trainstack.checkpointing.verification import of_run, open_checkpoint
from trainstack.cli.checkpoint_contents import located
from trainstack.cli.main import COMMANDS, Parser
from trainstack.cli.options import Inputs
from trainstack.cli.predictions import check_output, write_predictions
from trainstack.cli.printing import print_json, print_lines
from trainstack.cli.target import load_targets, report_user_errors
from trainstack.cli.train import split_target
from trainstack.errors import CheckpointNotFoundError, ConfigurationError
from trainstack.trainer import Trainer, TrainerArguments, seed_everything
from trainstack.trainer.argument_checks import RESUME_WORDS
from trainstack.trainer.plain_arguments import read_config
from trainstack.trainer.run_directory import DEFAULT_ROOT
from trainstack.trainer.run_files import CONFIG
from trainstack.trainer.run_record import read_record
from trainstack.trainer.tracking.progress import format_plan_table

_MOST_USED = frozenset(
    {"val_batch_size", "max_val_steps_per_epoch", "backend", "device", "compile", "seed", "resume", "init_weights_from"}
)
_OF_TRAINING = frozenset(
    {"resume", "resume_mode", "strict_resume", "init_weights_from", "init_weights_strict", "overwrite"}
    | {"reset_optimizers_schedulers", "output_dir", "local_dir", "target"}
    | {"fast_dev_run", "overfit_batches", "max_val_steps_per_epoch"}
)
"""Keys in the `config.yaml` of a run that say how its training began, or limit its validations."""
_OF_SAVING = frozenset({"load_dir", "load_filename", "delete_existing_checkpoints"})  # among its `checkpointer_args`
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
        chosen: arguments that load them; None for a run, of which --resume selects a checkpoint.
    """

    path: str | None = None
    folder: Path | None = None
    chosen: Mapping[str, Any] | None = None

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
            return cls(path=given, folder=folder, chosen={"init_weights_from": str(root), "init_weights_strict": True})
        return cls(path=given, folder=folder, chosen={"resume": str(root)})

    def defaults(self) -> tuple[dict[str, Any], str]:
        """The arguments of the run, for an evaluation in this process, and the name of their file."""
        if self.folder is None or not (file := self.folder / CONFIG).is_file():
            return {}, ""
        config = read_config(file)
        values = {name: value for name, value in config.items() if name not in _OF_TRAINING}
        if isinstance(saving := values.get("checkpointer_args"), dict):
            saving = {name: value for name, value in saving.items() if name not in _OF_SAVING}
            if isinstance(given := saving.get("save_dir"), str):
                saving["save_dir"] = str(_start_of(self.folder, config) / given)
            values["checkpointer_args"] = saving
        return _for_this_process(values), str(file)

    def applied_to(self, args: TrainerArguments) -> TrainerArguments:
        """`args` with these weights.

        Raises:
            ConfigurationError: `args` name other weights, or limit a training.
            CheckpointNotFoundError: the run has no checkpoint.
        """
        for name in ("fast_dev_run", "overfit_batches"):
            if value := getattr(args, name):
                why = "is for trainings, and an evaluation loads the weights and reads all data"
                raise ConfigurationError(f"{name}: {value} {why}. Remove it.")
        if self.path is None:
            return args
        saving, is_choice = args.checkpointer_args, self.chosen is None and args.resume in (True, *RESUME_WORDS)
        others: dict[str, Any] = {"resume": None if is_choice else args.resume or None}
        others["init_weights_from"] = args.init_weights_from
        others |= {f"checkpointer_args.{name}": getattr(saving, name) for name in ("load_dir", "load_filename")}
        for name, value in others.items():
            if value is not None:
                both = f"{self.path} names the weights, and so does {name}: {value}"
                raise ConfigurationError(f"{both}. Remove one of them.")
        if self.chosen is not None:
            return replace(args, output_dir=self.folder, **self.chosen)
        folder = Path(saving.save_dir or f"{self.path}/checkpoints")
        contents = scan(folder)
        if not (of_run(contents, saving.file_prefix) or contents.broken or contents.broken_begins or contents.newer):
            other = next((str(info.path) for info in contents.intact), "another run, a checkpoint or an export")
            raise CheckpointNotFoundError(f"the run {self.path} has no checkpoint in {folder}. Name {other}.")
        return replace(args, output_dir=self.folder, resume="best" if args.resume == "best" else "last")


def _start_of(folder: Path, config: Mapping[str, Any]) -> Path:
    """The folder in which the run in `folder` was started, by its relative `output_dir`; else the current one."""
    own = Path(os.path.abspath(folder)).parts
    below = Path(str(config.get("output_dir") or f"{DEFAULT_ROOT}/{own[-1]}")).parts
    at = len(own) - len(below)
    return Path(*own[:at]) if own[at:] == below else Path()


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
    _run(command, target, path, options)
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
            rows, found = [(name, str(value)) for name, value in written.items()], written
        else:
            found = {"metrics": _metrics(trainer, command)}
            rows = [(name, f"{v:.6g}" if isinstance(v, float) else str(v)) for name, v in found["metrics"].items()]
    if trainer.is_main_process:
        loaded = next(iter(trainer._context.lineage.ancestors), None)
        _show(given.json, _name_of(loaded, weights, trainer), 0 if loaded is None else loaded.global_step, rows, found)


def _name_of(loaded: Ancestor | None, weights: _Weights, trainer: Trainer) -> str | None:
    """The name of the loaded weights: as it was given, or the checkpoint that was found; None without any."""
    if loaded is None or weights.path is not None:
        return weights.path
    given = trainer.args.init_weights_from if loaded.how == "init_weights_from" else trainer.args.resume
    if isinstance(given, bool) or given in RESUME_WORDS:
        given = Path(getattr(trainer.checkpointer, "loaded_from", None) or "") / loaded.name
    return str(given)


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
            f"with at least one batch, and return the loss from {step}_step or give the module metrics."
        )
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.metrics.items()}


def _show(as_json: bool, weights: str | None, step: int | None, rows: list[Any], found: dict[str, Any]) -> None:
    if as_json:
        print_json({"weights": weights, "global_step": step, **found})
        return
    shown = "those that the module was made with" if weights is None else weights
    shown += "" if weights is None or step is None else f", global step {step}"
    print_lines(format_plan_table([("weights", shown), *rows]))
