"""Arguments and base class of writers."""

from trainstack.compat.pymarlin.utils.writer.base import Writer, WriterInitArguments

__all__ = ["Writer", "WriterInitArguments"]
