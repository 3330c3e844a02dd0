"""Module, trainer, backends and data."""
