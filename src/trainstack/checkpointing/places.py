"""Where in a state tree a value sits: for error messages and for the names of tensors."""

from __future__ import annotations

from typing import Any

RESERVED = "__metadata__"


class Index(int):
    """A position in a sequence, as opposed to an integer key of a dict."""


def describe(root: str, place: list[Any]) -> str:
    """`("trainer_state", ["optimizers", Index(0), "state"])` -> `trainer_state.optimizers[0].state`."""
    text = root
    for part in place:
        plain = isinstance(part, str) and part.isidentifier()
        text += f".{part}" if plain else f"[{part!r}]"
    return text.lstrip(".") or "the state itself"


class TensorNames:
    """Gives each stored tensor a readable name that no other tensor of the checkpoint has."""

    def __init__(self) -> None:
        self._taken = {RESERVED}

    def claim(self, prefix: str, place: list[Any]) -> str:
        parts = ([prefix] if prefix else []) + [str(part) for part in place]
        readable = ".".join(parts).encode("utf-8", "replace").decode() or "tensor"
        name, count = readable, 1
        while name in self._taken:
            count += 1
            name = f"{readable}#{count}"
        self._taken.add(name)
        return name
