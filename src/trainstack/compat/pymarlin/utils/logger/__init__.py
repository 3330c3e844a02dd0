"""Loggers with one format."""

from trainstack.compat.pymarlin.utils.logger.logging_utils import getlogger

__all__ = ["getlogger"]
