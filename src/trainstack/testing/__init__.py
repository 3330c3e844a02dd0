"""Utilities for tests of modules: one step without a trainer."""

from trainstack.trainer.run.single_step import StepResult, run_step

__all__ = ["StepResult", "run_step"]
