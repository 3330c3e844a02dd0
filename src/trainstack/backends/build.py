"""`build_trainer_backend` builds the stack of layers that a backend string names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainstack.backends.base import TrainerBackend
from trainstack.backends.decorator import AbstractTrainerBackendDecorator
from trainstack.backends.single_process import SingleProcess
from trainstack.backends.spec import LayerRecord, parse_spec, registered_backend
from trainstack.errors import ConfigurationError


def build_trainer_backend(name: str, *args: Any, **options: Mapping[str, Any]) -> TrainerBackend:
    """Build the stack that `name` describes.

    Args:
        name: a backend string such as `"sp-amp"`, or the name of a backend registered by `register_trainer_backend`
            (then `args` and `options` go to its factory).
        *args: arguments of the factory of a registered backend.
        **options: keyword arguments for one layer each, under its token with `_` for `-`:
            `build_trainer_backend("sp-amp", amp={"init_scale": 1024.0})`.

    Raises:
        BackendSpecError: no legal stack has this name.
        ConfigurationError: an option names a layer that is not in the stack, or the layer does not take the option.

    Examples:
        >>> backend = ts.build_trainer_backend("sp-bf16")
        >>> ts.Trainer(module, args, trainer_backend=backend).train()
    """
    factory = registered_backend(name) if isinstance(name, str) else None
    if factory is not None:
        return factory(*args, **options)  # type: ignore[no-any-return]
    records = parse_spec(name)
    if args:
        raise ConfigurationError(
            f"build_trainer_backend({name!r}, {args[0]!r}): options are given by layer, for example "
            f"build_trainer_backend({name!r}, {_keyword(records[-1])}={{...}})."
        )
    unknown = set(options) - {_keyword(record) for record in records}
    if unknown:
        raise ConfigurationError(
            f"backend {name!r} has no layer for the options {sorted(unknown)}. "
            f"Its layers are {', '.join(_keyword(record) for record in records)}.{_nested(records, options, unknown)}"
        )
    standalone = records[0].layer is SingleProcess
    stack = _make(records[0], options) if standalone else SingleProcess(standalone=False)
    for record in reversed(records[1:] if standalone else records):
        stack = _make(record, options, stack)
    return stack


def _nested(records: Sequence[LayerRecord], options: Mapping[str, Any], unknown: Iterable[str]) -> str:
    """Examples with the layer of each unknown option that exactly one layer of the stack takes."""
    hints = []
    for name in sorted(unknown):
        if name == "enable_amp":
            hints.append(" The backend string says whether amp is on: 'sp-amp' with it, 'sp' without.")
            continue
        takers = [record for record in records if name in inspect.signature(record.layer.__init__).parameters]
        if len(takers) == 1:
            hints.append(f" Write {_keyword(takers[0])}={{{name!r}: {options[name]!r}}}.")
    return "".join(hints)


def _keyword(record: LayerRecord) -> str:
    return record.token.replace("-", "_")


def _make(record: LayerRecord, options: Mapping[str, Mapping[str, Any]], *inner: TrainerBackend) -> TrainerBackend:
    chosen = options.get(_keyword(record), {})
    if inner and not issubclass(record.layer, AbstractTrainerBackendDecorator):
        raise ConfigurationError(
            f"layer {record.token!r} ({record.layer.__name__}) cannot wrap another one. "
            "Derive it from AbstractTrainerBackendDecorator."
        )
    if not isinstance(chosen, Mapping):
        raise ConfigurationError(
            f"options for layer {record.token!r}: {chosen!r} is not a mapping. Write them by name: "
            f"{_keyword(record)}={{'NAME': {chosen!r}}}."
        )
    try:
        return record.layer(*inner, **chosen)
    except TypeError as error:
        raise ConfigurationError(
            f"layer {record.token!r} does not take the options {dict(chosen)!r}: {error}."
        ) from error


def explain(spec: str) -> str:
    """Describe the stack that `spec` builds, in plain text.

    Raises:
        BackendSpecError: `spec` is not a legal stack.

    Examples:
        >>> print(ts.explain("sp-bf16"))
        sp-bf16...
    """
    return build_trainer_backend(spec).explain()
