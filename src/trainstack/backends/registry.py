"""The table of layers: which tokens a backend string may use, and in which slot each stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trainstack.backends.base import VERBS, Slot, TrainerBackend
from trainstack.errors import ConfigurationError

Layer = TypeVar("Layer", bound=type[TrainerBackend])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One row of the table."""

    token: str
    slot: Slot
    layer: type[TrainerBackend]


_LAYERS: dict[str, LayerRecord] = {}
_BACKENDS: dict[str, Callable[..., TrainerBackend]] = {}


def register_layer(token: str, *, slot: Slot = Slot.USER) -> Callable[[Layer], Layer]:
    """Class decorator that makes a layer available under `token` in backend strings.

    Raises:
        ConfigurationError: the token is not made of lower-case letters, digits and inner hyphens, or is taken; or
            the layer declares an end of something that is no verb.
    """
    if not all(part.isalnum() and part == part.lower() for part in token.split("-")):
        raise ConfigurationError(
            f"register_layer({token!r}): a token is made of lower-case letters and digits, e.g. 'ema' or 'amp-apex'."
        )
    if token in _LAYERS or token in _BACKENDS:
        raise ConfigurationError(f"register_layer({token!r}): this token is taken. Choose another one.")

    def add(layer: Layer) -> Layer:
        unknown = sorted(set(layer.ends) - set(VERBS))
        if unknown:
            raise ConfigurationError(
                f"register_layer({token!r}): {layer.__name__}.ends names {', '.join(map(repr, unknown))}, and no verb "
                f"is called so. The verbs are {', '.join(VERBS)}."
            )
        layer.name, layer.slot = token, slot
        _LAYERS[token] = LayerRecord(token=token, slot=slot, layer=layer)
        return layer

    return add


def register_trainer_backend(name: str, factory: Callable[..., TrainerBackend]) -> None:
    """Make a whole backend of your own available under `name`, outside the grammar of layers.

    Raises:
        ConfigurationError: the name is taken.
    """
    if name in _LAYERS or name in _BACKENDS:
        raise ConfigurationError(f"register_trainer_backend({name!r}): this name is taken. Choose another one.")
    _BACKENDS[name] = factory


def unregister(name: str) -> None:
    """Take a layer or backend of your own out of the table again; unknown names are ignored."""
    _LAYERS.pop(name, None)
    _BACKENDS.pop(name, None)


def known_layers() -> dict[str, LayerRecord]:
    """A copy of the table of layers, by token."""
    return dict(_LAYERS)


def registered_backend(name: str) -> Callable[..., Any] | None:
    """The factory registered under `name`, or None."""
    return _BACKENDS.get(name)
