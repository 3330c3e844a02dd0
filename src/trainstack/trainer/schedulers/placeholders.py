"""Placeholders for numbers of the plan, such as `placeholders.TOTAL_STEPS // 10`.

Use them in the keywords of a `functools.partial`, in lists and dicts, at any depth. `resolve` replaces them by numbers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from trainstack.errors import ConfigurationError

if TYPE_CHECKING:
    from trainstack.trainer.core.plan import TrainingPlan

_Operator = Callable[[Any, Any], "Expression"]


def _operators(function: Callable[..., Any], symbol: str) -> tuple[_Operator, _Operator]:
    """Return the methods for `self symbol other` and `other symbol self`."""

    def expression(left: Any, right: Any) -> Expression:
        for operand in (left, right):
            if isinstance(operand, bool) or not isinstance(operand, int | float | Lazy):
                return NotImplemented  # type: ignore[no-any-return]
        return Expression(function, symbol, (left, right))

    return expression, lambda self, other: expression(other, self)


class Lazy:
    """A number without a value yet. `+ - * / //`, `-x`, `round`, `math.floor` and `math.ceil` return another one."""

    __add__: _Operator
    __radd__: _Operator
    __sub__: _Operator
    __rsub__: _Operator
    __mul__: _Operator
    __rmul__: _Operator
    __truediv__: _Operator
    __rtruediv__: _Operator
    __floordiv__: _Operator
    __rfloordiv__: _Operator
    __slots__ = ()

    __add__, __radd__ = _operators(operator.add, "+")
    __sub__, __rsub__ = _operators(operator.sub, "-")
    __mul__, __rmul__ = _operators(operator.mul, "*")
    __truediv__, __rtruediv__ = _operators(operator.truediv, "/")
    __floordiv__, __rfloordiv__ = _operators(operator.floordiv, "//")

    def __neg__(self) -> Expression:
        return Expression(operator.neg, "-", (self,))

    def __round__(self, digits: int | None = None) -> Expression:
        return Expression(round, "round", (self,) if digits is None else (self, digits))

    def __floor__(self) -> Expression:
        return Expression(math.floor, "math.floor", (self,))

    def __ceil__(self) -> Expression:
        return Expression(math.ceil, "math.ceil", (self,))

    def _unknown(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            f"{self!r} has no value before the run's plan exists. Pass it unchanged to a functools.partial or in the "
            "options of a scheduler or optimizer; write round(...), math.floor(...) or // for a whole number."
        )

    __int__ = __float__ = __index__ = __bool__ = __complex__ = __trunc__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown


@dataclass(frozen=True, slots=True)
class Placeholder(Lazy):
    """A number of the plan.

    Attributes:
        name: its name in this file.
        field: its field of `TrainingPlan`.
    """

    name: str
    field: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Expression(Lazy):
    """Arithmetic on placeholders, evaluated when their values are known."""

    function: Callable[..., Any]
    symbol: str
    operands: tuple[Any, ...]

    @property
    def is_compound(self) -> bool:
        """Whether it has a symbol between two operands."""
        return len(self.operands) == 2 and self.function is not round

    def __repr__(self) -> str:
        if self.is_compound:
            compound = [isinstance(part, Expression) and part.is_compound for part in self.operands]
            parts = zip(self.operands, compound, strict=True)
            return f" {self.symbol} ".join(f"({part!r})" if inner else repr(part) for part, inner in parts)
        return f"{self.symbol}({', '.join(map(repr, self.operands))})"


NUM_EPOCHS = Placeholder("NUM_EPOCHS", "epochs")
"""Epochs of the run."""
STEPS_PER_EPOCH = Placeholder("STEPS_PER_EPOCH", "steps_per_epoch")
"""Global steps (updates) an epoch, on all processes together."""
NUM_UPDATE_STEPS_PER_EPOCH = Placeholder("NUM_UPDATE_STEPS_PER_EPOCH", "steps_per_epoch")
"""The same, with the name in pytorch-accelerated."""
TOTAL_STEPS = Placeholder("TOTAL_STEPS", "total_steps")
"""Global steps of the run."""
GLOBAL_BATCH = Placeholder("GLOBAL_BATCH", "global_batch")
"""Samples a global step, over all processes."""
WORLD_SIZE = Placeholder("WORLD_SIZE", "world_size")
"""Processes."""


def __getattr__(name: str) -> NoReturn:
    if name in ("TRAIN_DATALOADER_LEN", "EVAL_DATALOADER_LEN"):
        raise AttributeError(
            f"placeholders.{name}: a schedule steps once an update, and an update may take several batches of a "
            "loader. Write placeholders.STEPS_PER_EPOCH."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def resolve(value: Any, plan: TrainingPlan) -> Any:
    """Return `value` with the numbers of `plan` in place of all placeholders.

    Lists, tuples, dicts and `functools.partial` objects are rebuilt; other values are not changed.

    Raises:
        ConfigurationError: a number is unknown, or the arithmetic is invalid.
    """
    if isinstance(value, Lazy):
        return _number(value, plan)
    if isinstance(value, functools.partial):
        keywords = {key: resolve(item, plan) for key, item in value.keywords.items()}
        return type(value)(resolve(value.func, plan), *(resolve(item, plan) for item in value.args), **keywords)
    if type(value) is dict:
        return {key: resolve(item, plan) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(resolve(item, plan) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(resolve(item, plan) for item in value))
    return value


def _number(value: Any, plan: TrainingPlan) -> Any:
    if isinstance(value, Placeholder):
        number = getattr(plan, value.field)
        if number is None:
            otherwise = ", or set max_steps in TrainerArguments" if value.field == "total_steps" else ""
            raise ConfigurationError(
                f"{value!r} has no value: the training loader has no length. Define its __len__, the number of "
                f"batches{otherwise}."
            )
        return number
    if not isinstance(value, Expression):
        return value
    try:
        return value.function(*(_number(operand, plan) for operand in value.operands))
    except ArithmeticError as error:
        raise ConfigurationError(f"{value!r} cannot be computed with the numbers of this run: {error}.") from error
