"""Recorded runs that are replayed from every checkpoint, and planted differences that a replay has to find."""
