"""`trainstack doctor FILE.py[:MODULE]` trains a few steps of a script without a trace, and looks for mistakes."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from trainstack.cli.main import Parser
from trainstack.cli.options import Inputs
from trainstack.cli.printing import FAILED, print_json, print_lines
from trainstack.cli.target import UserCodeError, load_target, modules_of_file, report_user_errors
from trainstack.errors import ConfigurationError
from trainstack.trainer import ModuleInterface, Trainer, TrainerArguments, seed_everything
from trainstack.trainer.misplaced import check_module
from trainstack.verifying.script_checks.examine import examine
from trainstack.verifying.script_checks.findings import CHECKS
from trainstack.verifying.script_checks.script_file import TrainingReached, first_training, train_refused
from trainstack.verifying.script_checks.sources import Source

_ABOUT = (
    "Train a few global steps of a module on the CPU and evaluate two validation batches, in a temporary folder, and "
    "look for common mistakes. FILE.py:MODULE takes the options of `trainstack train`. FILE.py alone runs the script "
    "until it trains, with the words after --, and checks that training; a file that does not train has to define one "
    "module. Exit code 0: no problem; 1: problems; 2: the script cannot be checked."
)


class _Subject(NamedTuple):
    """A module to check, the arguments of its run, and further arguments of the trainer."""

    module: ModuleInterface
    args: TrainerArguments
    given: dict[str, Any]


def script_in(words: Sequence[str]) -> str | None:
    """The script that the words after `doctor` name; None where they name backend strings."""
    files = [word for word in words if word.endswith(".py") or ".py:" in word]
    left = [word for word in words if word != "--json"]  # the other options have a value, such as cuda:0
    others = [word for before, word in zip(["", *left], left, strict=False) if "-" not in (before[:1], word[:1])]
    return next(iter([*files, *(word for word in others if ":" in word)]), None)


def run(words: Sequence[str]) -> int:
    """Check the script that `words` name. Returns the exit code."""
    words, script_words = _split(words)
    target = script_in(words)
    assert target is not None
    options = list(words)
    options.remove(target)
    try:
        with report_user_errors():
            given, subject = _subject(target, options, script_words)
            if given.steps < 1:
                raise ConfigurationError(f"--steps {given.steps}: write a whole number, 1 or more.")
            path = _file_of(target, subject.module)
            report = examine(
                target,
                subject.module,
                subject.args,
                None if path is None else Source.read(path),
                steps=given.steps,
                ignore=_known(given.ignore),
                **subject.given,
            )
    except UserCodeError as error:
        if script_words or not target.endswith(".py"):
            raise
        hint = f"if {target} takes arguments, write them after --: trainstack doctor {target} -- WORD ..."
        raise UserCodeError(hint) from error.__cause__
    if given.json:
        print_json(report.to_dict())
    else:
        print_lines("\n".join(report.lines()))
    return FAILED if report.problems else 0


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of this command, and those after `--`, which the script gets."""
    left = list(words)
    at = left.index("--") if "--" in left else len(left)
    return left[:at], left[at + 1 :]


def _subject(target: str, options: Sequence[str], script_words: Sequence[str]) -> tuple[Any, _Subject]:
    path, is_file = Path(target), target.endswith(".py")
    if is_file and not any(word in ("--help", "-h") for word in options):
        source = Source.read(path)
        if _are_own(options) and source is not None:
            given = _parser(target).parse_args(list(options))
            trainer = first_training(path, script_words)
            if trainer is not None:
                return given, _of_trainer(trainer)
    try:
        with train_refused():
            target = f"{target}:{_only_module(path)}" if is_file else target
            made_by = load_target(target)
    except TrainingReached as reached:  # the file trains when it is imported, which D606 says
        if _are_own(options):
            return _parser(target).parse_args(list(options)), _of_trainer(reached.trainer)
        made_by = _made_before(reached, target, options)
    return _of_target(target, made_by, options)


def _made_before(reached: TrainingReached, target: str, options: Sequence[str]) -> Callable[..., Any]:
    """The object with the name `target` in the file that was interrupted where it trains."""
    for frame, _ in traceback.walk_tb(reached.__traceback__):
        found: Any = frame.f_globals.get(target.rpartition(":")[2])
        if frame.f_code.co_name == "<module>" and found is not None:
            return cast("Callable[..., Any]", found)
    why = f"{target} trains when it is imported, with its own arguments, so {' '.join(options)} has no effect"
    raise ConfigurationError(f'{why}. Remove it, or write if __name__ == "__main__": before the training.')


def _only_module(path: Path) -> str:
    """The name of the one module that a file defines.

    Raises:
        ConfigurationError: it defines none, or several.
    """
    names = modules_of_file(path)
    if len(names) != 1:
        which = f"the modules {', '.join(names)}" if names else "no ModuleInterface"
        raise ConfigurationError(
            f"{path} does not train, and has {which}. Write {path}:NAME, with the name of a class or of a function "
            "that returns a module."
        )
    return names[0]


def _of_target(target: str, made_by: Callable[..., Any], options: Sequence[str]) -> tuple[Any, _Subject]:
    parser = _parser(target)
    inputs = Inputs(parser, made_by)
    given = inputs.read(options)
    arguments = inputs.arguments()
    seed_everything(arguments.seed)
    module = made_by(**inputs.parameters(target))
    check_module(Trainer, module, arguments)
    return given, _Subject(module, arguments, {})


def _of_trainer(trainer: Any) -> _Subject:
    _, _, _, train_step, val_step, metrics = trainer._given
    given = {"train_step": train_step, "val_step": val_step, "metrics": metrics}
    return _Subject(trainer.module, trainer.args, {name: value for name, value in given.items() if value is not None})


def _are_own(options: Sequence[str]) -> bool:
    """Whether all options are of this command, and none of the trainer or the module."""
    names = {word.partition("=")[0] for word in options if word.startswith("-")}
    return names <= {"--steps", "--ignore", "--json"}


def _parser(target: str) -> Parser:
    parser = Parser(
        prog=f"trainstack doctor {target}", description=_ABOUT, usage="%(prog)s [--OPTION VALUE ...] [-- WORD ...]"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="global steps to train (default: 3)")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="skip a check, such as D102")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _known(ignored: Sequence[str]) -> set[str]:
    for one in ignored:
        if one not in CHECKS:
            raise ConfigurationError(f"--ignore {one}: there is no such check. docs/guides/doctor.md lists the ids.")
    return set(ignored)


def _file_of(target: str, module: ModuleInterface) -> Path | None:
    place = target.rpartition(":")[0] or target
    if place.endswith(".py"):
        return Path(place)
    file = inspect.getsourcefile(type(module))
    return None if file is None else Path(file)
