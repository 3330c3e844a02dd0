"""The HTML report of a run, written when the run ends."""
