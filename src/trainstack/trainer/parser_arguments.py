"""`ParserArguments`: the arguments of a run as a dataclass whose fields have plain types."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from trainstack.trainer.argument_schemas import from_parser, parser_fields
from trainstack.trainer.arguments import TrainerArguments

_DOC = """The arguments of a run for parsers that support only plain types, such as HfArgumentParser and OmegaConf.

It is a dataclass with a field for each value of `TrainerArguments`; `checkpointer_args__keep_last` is the value
`keep_last` of `checkpointer_args`. A field with values of several types is a string, written as on the command line of
`trainstack train`: `"10"`, `"0.5"`, `"[csv, jsonl]"`, `"null"`. None means the default.
"""


def _to_arguments(self: Any) -> TrainerArguments:
    """Return the arguments of the run.

    Raises:
        ConfigurationError: a value has another type than its field, or is out of range.
    """
    made: TrainerArguments = from_parser(TrainerArguments, self)
    return made


if TYPE_CHECKING:  # the generated class has the fields of TrainerArguments

    class ParserArguments:
        """The arguments of a run for parsers that support only plain types."""

        def __init__(self, **values: Any) -> None: ...

        def to_arguments(self) -> TrainerArguments:
            """Return the arguments of the run."""
            raise NotImplementedError

else:
    ParserArguments = dataclasses.make_dataclass(
        "ParserArguments",
        parser_fields(TrainerArguments),
        namespace={"__doc__": _DOC, "__module__": __name__, "to_arguments": _to_arguments},
    )
