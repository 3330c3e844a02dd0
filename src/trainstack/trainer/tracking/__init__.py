"""Metrics of a run and their way to screen, files and trackers."""
