"""Data of the user's own that goes with a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainstack.errors import CheckpointMismatchError


class UserState(dict[str, Any]):
    """A dict whose items are attributes too: `trainer.user_state.best_word = "yes"`.

    It is saved with checkpoints and comes back on resume. An item with `state_dict` and `load_state_dict` is saved by
    what the one returns, and given that back by the other; it has to be there, made anew, before `train` resumes. Other
    items are values, of what a checkpoint can hold: numbers, strings, tensors, arrays, and lists, tuples, sets and
    dicts of those. With several processes the main one's state is kept, and all get it back.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"user_state has no {name!r}; it has {sorted(self) or 'nothing yet'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(f"user_state.{name} is a method of it; write user_state[{name!r}] = ... instead.")
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self[name]

    def get_state(self) -> dict[str, Any]:
        """The values, and the states of the objects, by name."""
        objects = {name: item.state_dict() for name, item in self.items() if _has_state(item)}
        return {"values": {name: item for name, item in self.items() if name not in objects}, "objects": objects}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take on what `get_state` returned; an item that it does not name stays as it is.

        Raises:
            CheckpointMismatchError: an object is missing here whose state it has.
        """
        objects = state["objects"]
        missing = sorted(name for name in objects if not _has_state(self.get(name)))
        if missing:
            raise CheckpointMismatchError(
                f"the checkpoint has the state of {', '.join(f'user_state.{name}' for name in missing)}, and there is "
                f"no such object with load_state_dict. Write trainer.user_state.{missing[0]} = ... before train()."
            )
        self.update(state["values"])
        for name, saved in objects.items():
            self[name].load_state_dict(saved)


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
