"""A public suite of small deterministic tests for any trainer.

`task.py` defines a run, `adapters/` has one file for each trainer, and `cases/` the tests.
"""
