"""Statistics, checkpoints, configuration, logging and processes."""
