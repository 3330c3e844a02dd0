"""Whether training may begin."""

from __future__ import annotations

from trainstack.errors import ConfigurationError, PrivacyBudgetError
from trainstack.stage import Stage
from trainstack.trainer.order import mix
from trainstack.trainer.run import Run
from trainstack.trainer.seeding import isolated_rng
from trainstack.trainer.signatures import lacks


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


def what_is_done(run: Run) -> str:
    """Why a run that is over has nothing left to do, and what to write for more."""
    state, plan, args = run.state, run.data.plan, run.args
    if plan.max_steps is not None:
        made, planned, more = _number(state.global_step, "global step"), f"max_steps={plan.max_steps}", "max_steps"
        least = state.global_step + 1
    else:
        made, planned, more = _number(state.epoch, "epoch"), f"epochs={args.epochs}", "epochs"
        least = state.epoch + 1
    if not state.global_step:
        return f"{planned}: there is nothing to train"
    return (
        f"{made} trained already, and {planned}: nothing is left to do. Write {more}={least} or more to go on, or "
        "resume=False or another output_dir to begin anew."
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what} is" if count == 1 else f"{count} {what}s are"


def admit(run: Run) -> None:
    """Refuse to train when no step may be made, or when its first validation is bound to fail.

    Raises:
        PrivacyBudgetError: saying what is used up.
        ModuleContractError: there is data to validate on, and no `val_step`.
    """
    if run.is_over:
        return
    if run.why_over is not None:
        raise PrivacyBudgetError(run.why_over)
    module, val_step = run.module, run.evaluator.val_step
    if run.args.validate_every == 0 or not lacks(module, "val_step", val_step) or lacks(module, "get_val_dataloaders"):
        return
    with isolated_rng(mix(run.state.seed), run.world.device):  # asked here once more only where that may find the fault
        loaders = run.evaluator.loaders_of(Stage.VAL)
    if loaders:
        raise module._lacks("val_step", "get_val_dataloaders")
