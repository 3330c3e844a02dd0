"""Options of `trainstack train` and `plan`: the fields of `TrainerArguments` and the parameters of the module.

A file given by `--config`, environment variables and words give plain values (`trainer/plain_arguments.py`). Words win
over variables, and those over the file.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from trainstack._kinds import Kind, Place
from trainstack.cli.main import Parser
from trainstack.errors import ConfigurationError
from trainstack.trainer import TrainerArguments
from trainstack.trainer.argument_schemas import explained
from trainstack.trainer.plain_arguments import (
    Path,
    PlainInputs,
    bound_init,
    is_plain,
    kinds_of,
    parameters_of,
    read_config,
    unknown,
)

PREFIX = "TRAINSTACK_"
"""Of the environment variables: TRAINSTACK_EPOCHS, TRAINSTACK_CHECKPOINTER_ARGS__KEEP_LAST."""

OTHER_VARIABLES = ("TRAINSTACK_CONFIG", "TRAINSTACK_FAST_PATHS", "TRAINSTACK_TOKEN", "TRAINSTACK_TRACEBACK")
"""Variables that are not options. `TRAINSTACK_FAST_PATHS`, a switch of the library, wins over the option."""


_MOST_USED = frozenset(
    {"epochs", "max_steps", "train_batch_size", "val_batch_size", "gpu_batch_size_limit", "validate_every", "monitor"}
    | {
        "clip_grads",
        "max_grad_norm",
        "backend",
        "device",
        "compile",
        "seed",
        "resume",
        "init_weights_from",
        "output_dir",
    }
    | {"overwrite", "writers", "progress", "checkpointer_args.every_n_steps", "checkpointer_args.keep_last"}
)
"""The options that the help of `train` and `plan` shows."""

_OWN_TEXTS = {
    "seed": "of the data order, the samples, and the generators of the process before the module is made (default: 0)",
    "checkpointer_args.save_dir": "the folder of checkpoints (default: checkpoints in the output_dir)",
    "stats_args.log_steps": "an older spelling of --log_every, which it replaces",
    "writer_args.tb_log_dir": "an older spelling of --output_dir, for the files of writers alone",
}
"""Help of options whose text in the library is about scripts, or about the class as a whole."""


class _HelpAll(argparse.Action):
    """Print the help with all options."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, inputs: Inputs, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._inputs = inputs

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        self._inputs.show_all()
        parser.print_help()
        parser.exit()


class Inputs:
    """The values of a command line, its environment and its files.

    Args:
        parser: to which an option is added for each field and parameter.
        makes_module: the class or function whose parameters are `--module.NAME`; None for a command without a module.
        most_used: the options that `--help` shows.
    """

    def __init__(
        self, parser: Parser, makes_module: Callable[..., Any] | None = None, most_used: Set[str] = _MOST_USED
    ) -> None:
        self._parser, self._makes_module, self._most_used = parser, makes_module, most_used
        parser.other_names = TrainerArguments.ALIASES
        parameters = parameters_of(makes_module) if makes_module is not None else {}
        self._plain = PlainInputs(TrainerArguments, {"module": parameters} if makes_module is not None else None)
        self._paths = {".".join(path): path for path in self._plain.paths()}
        parser.add_argument("--config", action="append", default=[], metavar="FILE", help="a YAML file of options")
        self._texts: dict[argparse.Action, str] = {}
        parser.add_argument("--help-all", action=_HelpAll, inputs=self, help="show all options, and exit")
        self._add_options()

    def show_all(self) -> None:
        """Let the help show all options with whole texts, not only the first sentences of the most used ones."""
        for action, text in self._texts.items():
            action.help = text

    def _add_options(self) -> None:
        title = "arguments of the trainer, also keys of the file (the most used ones; --help-all shows all)"
        groups: dict[Path, Any] = {(): self._parser.add_argument_group(title)}
        for name, path in self._paths.items():
            if path[:-1] not in groups:
                groups[path[:-1]] = self._parser.add_argument_group(path[0])
            kind = self._plain.kind_of(path)
            text = self._explained(name, path, kind).replace("%", "%%")
            options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "metavar": _metavar(kind)}
            if bool in kind.types:
                options |= {"nargs": "?", "const": "true"}
                *parents, last = name.split(".")
                negative = ".".join([*parents, f"no_{last}"])
                hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
                groups[path[:-1]].add_argument(
                    f"--{negative}", dest=name, action="store_const", const="false", **hidden
                )
            is_shown = (path[0] == "module" or name in self._most_used) and not kind.takes_nothing
            action = groups[path[:-1]].add_argument(
                f"--{name}", help=_brief(text) if is_shown else argparse.SUPPRESS, **options
            )
            if not kind.takes_nothing:
                self._texts[action] = text

    def _explained(self, name: str, path: Path, kind: Kind) -> str:
        """The help of an option, with its default if the help has room for it."""
        if name in _OWN_TEXTS:
            return _OWN_TEXTS[name]
        if path[0] == "module":
            return self._explained_parameter(path[1]).strip()
        if len(path) > 1:
            return explained(kinds_of(TrainerArguments)[path[0]].fields).get(path[1], "").strip()
        text, default = explained(TrainerArguments).get(name, ""), getattr(TrainerArguments(), name, None)
        has_default = kind.fields is None and default not in (None, "", {})
        return f"{text} (default: {_as_option(default)})".strip() if has_default else text.strip()

    def _explained_parameter(self, name: str) -> str:
        assert self._makes_module is not None
        made_by = self._makes_module
        texts = explained(made_by) | explained(vars(made_by).get("__init__"))
        parameter = inspect.signature(bound_init(made_by)).parameters[name]
        default = parameter.default
        suffix = "required" if default is parameter.empty else f"default: {_as_option(default)}"
        return f"{texts.get(name, '')} ({suffix})"

    def read(
        self,
        words: Sequence[str],
        environ: Mapping[str, str] = os.environ,
        defaults: tuple[Mapping[str, Any], str] = ({}, ""),
    ) -> argparse.Namespace:
        """Take the words, the variables and the files that they name; returns the words that are not fields.

        Args:
            words: of the command line, after the target.
            environ: the variables.
            defaults: values that all others override, and the name of their file.

        Raises:
            ConfigurationError: a name is unknown, or a value is of another kind.
        """
        given = self._parser.parse_args(_attach_numbers(words, self._paths))
        self._plain.add_mapping(*defaults)
        files = [environ["TRAINSTACK_CONFIG"]] if "TRAINSTACK_CONFIG" in environ else []
        for file in (*files, *given.config):
            values = read_config(file)
            values.pop("target", None)  # of `trainstack train`, which has read it
            if self._makes_module is None:
                values.pop("module", None)  # of `trainstack train`, which may share the file
            self._plain.add_mapping(values, file)
        self._read_variables(environ)
        for name, path in self._paths.items():
            if hasattr(given, name):
                self._plain.add_text(path, getattr(given, name), Place(f"--{name}", " "))
        return given

    def _read_variables(self, environ: Mapping[str, str]) -> None:
        known: dict[str, list[Path]] = {}
        for path in self._paths.values():
            known.setdefault(PREFIX + "__".join(path).upper(), []).append(path)
        for name in sorted(environ):
            if not name.upper().startswith(PREFIX) or name in OTHER_VARIABLES:
                continue
            if self._makes_module is None and name.startswith(f"{PREFIX}MODULE__"):
                continue
            if name not in known:
                meant = name.upper()
                text = unknown(
                    "the environment", name, [meant] if meant in known else [*known, *OTHER_VARIABLES], "variable"
                )
                raise ConfigurationError(f"{text} Unset it, or write the name of an option in capitals.")
            path, *others = known[name]
            if others:
                options = " and ".join("--" + ".".join(each) for each in (path, *others))
                raise ConfigurationError(f"{name} stands for {options} alike. Unset it, and write the option.")
            self._plain.add_text(path, environ[name], Place(name, "="))

    def arguments(self) -> TrainerArguments:
        """The arguments of all that was read."""
        made: TrainerArguments = self._plain.arguments()
        return made

    def parameters(self, target: str) -> dict[str, Any]:
        """The given parameters of the module.

        Raises:
            ConfigurationError: one is missing; `target` is named.
        """
        assert self._makes_module is not None
        found = self._plain.others("module")
        kinds = parameters_of(self._makes_module)
        for name, parameter in inspect.signature(bound_init(self._makes_module)).parameters.items():
            if name not in kinds or name in found or parameter.default is not parameter.empty:
                continue
            if kinds[name].takes_nothing:
                raise ConfigurationError(
                    f"{target} has to be given {name!r}, an object, which no option makes. Write a function that "
                    "builds it and returns the module, and name that."
                )
            raise ConfigurationError(f"{target} has to be given --module.{name}.")
        return found

    def as_file(self, target: str) -> dict[str, Any]:
        """All that would be used, as a file for `--config` has it."""
        values = self.arguments().to_dict()
        if self._makes_module is not None:
            defaults = {
                name: parameter.default
                for name, parameter in inspect.signature(bound_init(self._makes_module)).parameters.items()
                if is_plain(parameter.default)
            }
            values["module"] = {**defaults, **self.parameters(target)}
        return values


def _brief(text: str) -> str:
    """The first sentence of the help of an option, and its default."""
    default = re.search(r" \(default: .*\)$", text)
    first = re.split(r"(?<=[\w`)\"][.;]) ", text)[0]
    if default is None or first.endswith(default[0]):
        return first.rstrip(".;")
    return f"{first.rstrip('.;')}{default[0]}"


_NUMBER = re.compile(r"-(\.?[0-9]|\.(inf|nan)$)", re.IGNORECASE)


def _attach_numbers(words: Sequence[str], options: Iterable[str]) -> list[str]:
    """`--lr=-1e-3` for `--lr -1e-3`: argparse takes such a number for an option (Python 3.11)."""
    attached: list[str] = []
    known = {f"--{name}" for name in options}
    for word in words:
        if _NUMBER.match(word) and attached and attached[-1] in known:
            attached[-1] += f"={word}"
        else:
            attached.append(word)
    return attached


def _metavar(kind: Kind) -> str:
    """The placeholder of the value in the help: `WHOLE_NUMBER|NULL`."""
    words = kind.words.upper().replace(" OR ", "|").replace(", ", "|").split("|")
    return "|".join(word.removeprefix("A ").replace(" ", "_") for word in words) or "VALUE"


def _as_option(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
