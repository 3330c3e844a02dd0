"""From a run to a checkpoint and back."""
