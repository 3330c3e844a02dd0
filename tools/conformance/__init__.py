"""A public suite of small deterministic tests that any trainer can be put through.

`task.py` defines a run, `adapters/` holds one file a trainer, `cases/` the tests.
"""
