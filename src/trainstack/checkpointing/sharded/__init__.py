"""Checkpoints in which each process writes its rows: chunk boundaries, parts, the commit, and reading by rows."""
