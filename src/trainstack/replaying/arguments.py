"""The arguments of a run, read from its folder."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainstack.backends.spec import registered_backend
from trainstack.errors import ConfigurationError
from trainstack.replaying.recorded import Leg, recorded_arguments
from trainstack.trainer import TrainerArguments
from trainstack.trainer.plain_arguments import PlainInputs, parameters_of, read_config
from trainstack.trainer.run_files import CONFIG

_PLAIN = (bool, int, float, str, type(None))
_OF_THE_COMMAND = ("target", "module")
"""Keys of the file that are not arguments of a trainer; see `module_parameters`."""


def arguments_of_run(folder: Path) -> TrainerArguments:
    """The arguments of the newest session of a run, from its `config.yaml`. Nothing in it is imported.

    Raises:
        ConfigurationError: the file does not exist, or a key or value in it is wrong.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigurationError(
            f"{folder} has no {CONFIG} with the arguments of the run. Pass them: args=..., or --config FILE."
        )
    return read_arguments(path)


def read_arguments(path: Path) -> TrainerArguments:
    """The arguments in a file of the form of `config.yaml`.

    Raises:
        ConfigurationError: a key or value in it is wrong.
    """
    inputs = PlainInputs(TrainerArguments)
    values = read_config(path)
    inputs.add_mapping({name: value for name, value in values.items() if name not in _OF_THE_COMMAND}, str(path))
    made: TrainerArguments = inputs.arguments()
    return made


def module_parameters(path: Path, makes_module: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of the module in a `config.yaml` of `trainstack train`; none without a file.

    Raises:
        ConfigurationError: `makes_module` has no parameter with the name, or does not accept the kind of value.
    """
    values = read_config(path).get("module") if path.is_file() else None
    if not values:
        return {}
    inputs = PlainInputs(TrainerArguments, {"module": parameters_of(makes_module)})
    inputs.add_mapping({"module": values}, str(path))
    return dict(inputs.others("module"))


def arguments_of_leg(args: TrainerArguments, leg: Leg, newest: Leg, *, given: bool) -> TrainerArguments:
    """The arguments with which the steps of `leg` were made.

    Args:
        args: those of the newest session, or those that the caller passed.
        leg: the steps.
        newest: the last steps of the run.
        given: whether the caller passed `args`.

    Raises:
        ConfigurationError: the sessions had other arguments, which the folder no longer has.
    """
    before, now = recorded_arguments(leg.end), recorded_arguments(newest.end)
    names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    names = [name for name in names if name not in ("backend", "device")]
    if names and not given:
        args = _with_earlier(args, {name: before.get(name) for name in names}, leg, newest)
    if registered_backend(args.backend) is not None or args.backend == leg.start.backend:
        return args
    return dataclasses.replace(args, backend=leg.start.backend)


def _with_earlier(args: TrainerArguments, before: Mapping[str, str | None], leg: Leg, newest: Leg) -> TrainerArguments:
    """`args` with the values of an earlier session, which the step log has as text.

    Numbers, texts, bools and None are parsed; no text is evaluated.
    """
    known = {field.name for field in dataclasses.fields(args)}
    try:
        values = {name: ast.literal_eval(text or "") for name, text in before.items()}
        if not known.issuperset(values) or not all(isinstance(one, _PLAIN) for one in values.values()):
            raise ValueError
        return dataclasses.replace(args, **values)
    except (ValueError, SyntaxError, MemoryError, RecursionError, ConfigurationError) as error:
        changes = ", ".join(f"{name} was {text}" for name, text in before.items())
        raise ConfigurationError(
            f"steps {leg.span.first} to {leg.span.last} were made with other arguments than {CONFIG} has, which is of "
            f"the newest session: {changes}. Pass those arguments (args=..., or --config FILE), or replay later steps: "
            f"--from {newest.span.first}."
        ) from error
