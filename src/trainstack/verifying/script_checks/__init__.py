"""Checks of a training script in a dry run of a few steps, for `trainstack doctor FILE.py`."""
