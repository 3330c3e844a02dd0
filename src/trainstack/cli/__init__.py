"""The command `trainstack`. It may use every package; no package uses it."""
