"""Select the columns of a data set of the library `datasets` that a model uses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trainstack.errors import ConfigurationError
from trainstack.trainer.arg_matching import TARGETS, NameMapping

_logger = logging.getLogger("trainstack")


def column_names(dataset: Any) -> list[str]:
    """The columns of a data set that has `remove_columns`; empty for other data sets and for unknown columns."""
    names = getattr(dataset, "column_names", None)
    return list(names) if isinstance(names, list) and callable(getattr(dataset, "remove_columns", None)) else []


def select_columns(dataset: Any, taken: Iterable[str], mappings: Iterable[NameMapping | None], *, remove: bool) -> Any:
    """Drop the unused columns of `dataset` and log their names; without `remove`, only log them.

    Args:
        dataset: a data set of any library.
        taken: the names that the model, the loss or the user asks for. Names in `TARGETS` are kept as well.
        mappings: dicts of old and new names of columns, functions, or None.
        remove: whether to drop the columns.

    Raises:
        ConfigurationError: `remove` is set, and the columns are unknown, a function maps them, or all are unused.
    """
    if dataset is None:
        return None
    columns = column_names(dataset)
    if remove and not columns:
        raise ConfigurationError(
            f"remove_unused_columns=True with a {type(dataset).__name__}, whose columns are not known. Give a data set "
            "of the library `datasets` with column_names (a stream after resolve_features()), or remove the argument."
        )
    functions = any(mapping is not None and not isinstance(mapping, Mapping) for mapping in mappings)
    if not columns or (functions and not remove):
        return dataset
    if functions:
        raise ConfigurationError(
            "remove_unused_columns=True with a function as input_mapping, which may use any column. Write a dict of "
            "old and new names, or call dataset.remove_columns([...])."
        )
    used = {*taken, *TARGETS, "label_ids"}
    used |= {old for mapping in mappings if isinstance(mapping, Mapping) for old in mapping}
    unused = [name for name in columns if name not in used]
    if not unused:
        return dataset
    if not remove:
        _logger.info(
            f"the data set has the columns {', '.join(unused)}, which neither the model nor the loss uses. "
            "SupervisedModule(remove_unused_columns=True) drops them before batches are made."
        )
        return dataset
    if len(unused) == len(columns):
        raise ConfigurationError(
            f"remove_unused_columns=True would drop all columns: {', '.join(unused)}. The model and the loss use "
            f"{', '.join(sorted(set(taken))) or 'none'}. Rename columns with input_mapping={{'old': 'new'}}."
        )
    _logger.info(f"the columns {', '.join(unused)} are dropped, because neither the model nor the loss uses them.")
    return dataset.remove_columns(unused)
