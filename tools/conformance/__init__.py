"""A public suite of small deterministic tests that any trainer can be put through.

`task.py` says what a run is, `adapters/` holds one file a trainer, `cases/` what is asked of it.
"""
