"""Conversion between a run and its checkpoints."""
