"""Checkpoints of which each process writes its own rows: cuts, parts, the commit, and reading by rows."""
