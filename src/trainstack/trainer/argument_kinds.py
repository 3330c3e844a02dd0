"""What kind of thing an argument is: checked first, before anything looks inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from trainstack.backends import DifferentialPrivacyArguments
from trainstack.checkpointing import DefaultCheckpointerArguments
from trainstack.errors import ConfigurationError
from trainstack.trainer.nested_arguments import StatsArguments, WriterArguments

Unchecked = Any
"""`TrainerArguments` before they are checked: nothing is certain about the types of their values."""

_MEANT = {"true": True, "yes": True, "false": False, "no": False}


def check_kinds(args: Unchecked) -> None:
    """Refuse what is of another kind than its argument, so that what is looked at later is there.

    Raises:
        ConfigurationError: naming the first.
    """
    _check_backend(args.backend, args.backend_options)
    if not isinstance(args.checkpointer_args, DefaultCheckpointerArguments):
        raise ConfigurationError(
            f"checkpointer_args={args.checkpointer_args!r}: write DefaultCheckpointerArguments(...), or give your own "
            "checkpointer to Trainer(..., checkpointer=...)."
        )
    given = args.differential_privacy_args
    if given is not None and not isinstance(given, DifferentialPrivacyArguments):
        raise ConfigurationError(
            f"differential_privacy_args={given!r}: write DifferentialPrivacyArguments(delta=..., target_epsilon=...)."
        )
    if not isinstance(args.output_dir, str | PathLike):
        raise ConfigurationError(f"output_dir={args.output_dir!r}: write the path of a folder.")
    devices = args.device if isinstance(args.device, list | tuple) else [args.device]
    if not devices or any(isinstance(one, bool) or not isinstance(one, str | torch.device | int) for one in devices):
        raise ConfigurationError(
            f"device={args.device!r}: write 'auto', 'cpu', 'cuda:0', the number of an accelerator, -1 for all of them, "
            "or a list with one for each process."
        )
    for name, nested in (("stats_args", StatsArguments), ("writer_args", WriterArguments)):
        if getattr(args, name) is not None and not isinstance(getattr(args, name), nested):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write {nested.__name__}(...) or None.")
    _check_writers(args.writers)
    if not isinstance(args.log_level, str | int):
        raise ConfigurationError(f"log_level={args.log_level!r}: write 'DEBUG', 'INFO', 'WARNING' or 'ERROR'.")


def check_resume(value: Any) -> None:
    """Refuse what cannot be resumed from, and words that would be taken for the name of a folder.

    Raises:
        ConfigurationError: saying what to write.
    """
    meant = _MEANT.get(value.lower()) if isinstance(value, str) else None
    if meant is not None:
        raise ConfigurationError(
            f"resume={value!r} would be the path of a checkpoint. Write resume={meant}, not in quotes."
        )
    if not isinstance(value, bool | str | PathLike) or value == "":
        raise ConfigurationError(
            f"resume={value!r}: write True, False, 'auto', 'best', 'last', or the path of a checkpoint."
        )


def _check_backend(backend: Any, options: Any) -> None:
    if not isinstance(backend, str):
        raise ConfigurationError(
            f"backend={backend!r}: write a backend string such as 'sp-bf16'. A stack that is built already goes to "
            "Trainer(..., trainer_backend=...)."
        )
    if not isinstance(options, Mapping) or not all(isinstance(chosen, Mapping) for chosen in options.values()):
        raise ConfigurationError(
            f"backend_options={options!r}: write a dict of options for each layer, by its token: "
            "{'amp': {'init_scale': 1024.0}}."
        )


def _check_writers(writers: Any) -> None:
    if isinstance(writers, str):
        raise ConfigurationError(f"writers={writers!r}: write a list: writers=[{writers!r}].")
    if not isinstance(writers, Sequence):
        raise ConfigurationError(
            f"writers={writers!r}: write a list of names and Writer objects, such as ['stdout', 'csv'], or [] for none."
        )
    for writer in writers:
        if isinstance(writer, type):
            raise ConfigurationError(
                f"writers=[{writer.__name__}] has the class itself. Give an object: {writer.__name__}(...)."
            )
