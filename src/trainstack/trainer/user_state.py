"""Data of the user's own that goes with a run."""

from __future__ import annotations

from typing import Any


class UserState(dict[str, Any]):
    """A dict whose items are attributes too: `trainer.user_state.best_word = "yes"`.

    It is saved with checkpoints and comes back on resume, so it may hold what a checkpoint can: numbers, strings,
    tensors, arrays, and lists, tuples, sets and dicts of those. With several processes the main one's is kept.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"user_state has no {name!r}; it has {sorted(self) or 'nothing yet'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(dict, name):
            raise AttributeError(f"user_state.{name} is a method of dict; write user_state[{name!r}] = ... instead.")
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self[name]
