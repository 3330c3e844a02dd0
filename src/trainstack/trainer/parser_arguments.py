"""`ParserArguments`, the arguments of a run as a dataclass whose fields have plain types."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from trainstack.trainer.argument_schemas import from_parser, parser_fields
from trainstack.trainer.arguments import TrainerArguments

_DOC = """The arguments of a run for parsers that take plain types only, such as HfArgumentParser and OmegaConf.

It is a dataclass with a field for each value of `TrainerArguments`; `checkpointer_args__keep_last` is the value
`keep_last` of `checkpointer_args`. A field with values of several types is text, written as on the command line of
`trainstack train`: `"10"`, `"0.5"`, `"[csv, jsonl]"`, `"null"`. None leaves it at its default.
"""


def _to_arguments(self: Any) -> TrainerArguments:
    """The arguments of the run.

    Raises:
        ConfigurationError: a value is of another kind than its field, or out of range.
    """
    made: TrainerArguments = from_parser(TrainerArguments, self)
    return made


if TYPE_CHECKING:  # the fields are those of the other class

    class ParserArguments:
        """See the documentation."""

        def __init__(self, **values: Any) -> None: ...

        def to_arguments(self) -> TrainerArguments:
            """The arguments of the run."""
            raise NotImplementedError

else:
    ParserArguments = dataclasses.make_dataclass(
        "ParserArguments",
        parser_fields(TrainerArguments),
        namespace={"__doc__": _DOC, "__module__": __name__, "to_arguments": _to_arguments},
    )
