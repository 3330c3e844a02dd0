"""`Mutable` lets a script assign to arguments until a `Trainer` uses them."""

from __future__ import annotations

from typing import Any

from trainstack._keywords import check_known_fields
from trainstack.errors import ConfigurationError


class Mutable:
    """Mixin before a frozen dataclass: fields can be assigned, and each assignment repeats all checks."""

    _in_use: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field.

        Raises:
            ConfigurationError: there is no such field, the value is wrong, or a trainer already uses these arguments.
        """
        kind = type(self).__name__
        if name not in vars(self):  # an attribute that is not a field, which only PyMarlin has
            check_known_fields(type(self), [name], kind)
        if self._in_use:
            raise ConfigurationError(
                f"{kind}.{name} was assigned after a Trainer was made of these arguments, which does not see it. "
                "Assign it before, or write trainer.train(epochs=...) for a longer training."
            )
        before = getattr(self, name)
        object.__setattr__(self, name, value)
        try:
            getattr(self, "__post_init__", lambda: None)()
        except Exception:
            object.__setattr__(self, name, before)
            raise
