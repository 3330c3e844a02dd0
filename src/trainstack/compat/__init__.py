"""Interfaces of other libraries, for scripts that change their import lines and nothing else."""
