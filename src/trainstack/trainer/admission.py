"""Whether training may begin."""

from __future__ import annotations

from trainstack.errors import ConfigurationError, PrivacyBudgetError
from trainstack.trainer.run import Run


def refuse_nested(run: Run) -> None:
    """Refuse to train inside of `train`: two loops would move the same counters.

    Raises:
        ConfigurationError: a hook or a step calls `train` of its own trainer.
    """
    if run.training:
        raise ConfigurationError(
            f"train() was called while it runs (after global step {run.state.global_step}), from a hook or a step. "
            "Call it again when it has returned, with train(epochs=...) for more epochs."
        )


def refuse_over(run: Run) -> None:
    """Refuse to train when no step may be made.

    Raises:
        PrivacyBudgetError: saying what is used up.
    """
    if not run.is_over and run.why_over is not None:
        raise PrivacyBudgetError(run.why_over)
