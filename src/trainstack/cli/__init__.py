"""The command `trainstack`."""
