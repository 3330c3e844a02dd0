"""Ranks compare what must be equal on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainstack.backends import Communicator
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.fingerprints import differing_names, hash_text

MAX_REPORTED = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between ranks.

    Attributes:
        name: of the first item that differs, in the order of rank 0.
        texts: its text by rank; None where a rank lacks it.
        others: names of further items that differ, some of them.
        ranks: those whose text is not that of rank 0.
    """

    name: str
    texts: tuple[str | None, ...]
    others: tuple[str, ...]
    ranks: tuple[int, ...]


def gather_differences(
    comm: Communicator, items: Mapping[str, str], most: int | None = None
) -> tuple[list[dict[str, str | None]], list[str]]:
    """In what each rank differs from rank 0, and the names of all of that, in the order of rank 0.

    All ranks call it, and all get the same answer. They exchange a hash of all items. Only where it differs they send
    more: rank 0 all of its items, and each rank those in which it differs from rank 0, at most `most`.
    """
    hashes = comm.gather(hash_text(repr(list(items.items()))), "comparing the ranks")
    if hashes.count(hashes[0]) == comm.size:
        return [], []
    of_main: dict[str, str] = comm.broadcast_object(dict(items), "comparing the ranks")
    reports = comm.gather(
        {name: items.get(name) for name in differing_names(items, of_main)[:most]}, "comparing the ranks"
    )
    order = {name: position for position, name in enumerate(of_main)}
    names = dict.fromkeys(name for report in reports for name in report)
    ordered = sorted(names, key=lambda name: order.get(name, len(order)))
    reports = [{name: of_main.get(name) for name in ordered[:1]} | report for report in reports]
    return reports, ordered


def find_difference(comm: Communicator, items: Mapping[str, str]) -> Difference | None:
    """The difference between the ranks, the same answer on all of them; None if all items are equal."""
    if comm.size == 1:
        return None
    reports, names = gather_differences(comm, items, MAX_REPORTED)
    if not names:  # perhaps the order of the items differs
        return None
    texts = tuple(report[names[0]] for report in reports)
    ranks = tuple(rank for rank, text in enumerate(texts) if text != texts[0])
    return Difference(names[0], texts, tuple(names[1:]), ranks)


def describe_ranks(texts: tuple[str | None, ...]) -> str:
    """ "is 0.01 on ranks 0 and 2, and 0.02 on rank 1"."""
    by_text: dict[str | None, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    parts = [f"{'missing' if text is None else text} on {format_ranks(ranks)}" for text, ranks in by_text.items()]
    return f"is {', '.join(parts[:-1])} and {parts[-1]}"


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """ "rank 3", or "ranks 0, 2, 3"; of many ranks the first."""
    shown = ", ".join(map(str, ranks[:MAX_REPORTED])) + (", ..." if len(ranks) > MAX_REPORTED else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def refuse_difference(comm: Communicator, items: Mapping[str, str], hidden: frozenset[str] = frozenset()) -> None:
    """Refuse items that are not equal on all ranks.

    Args:
        comm: of the ranks; all call this together.
        items: by name.
        hidden: items whose texts no message may show.

    Raises:
        ConfigurationError: naming the first item that differs, the ranks and their texts; on all ranks.
    """
    found = find_difference(comm, items)
    if found is None:
        return
    which = describe_ranks(found.texts)
    if found.name in hidden:
        which = f"is not on {format_ranks(found.ranks)} as on rank 0 (a private run does not show the values)"
    more = f" Also different: {'; '.join(found.others[:3])}." if found.others else ""
    raise ConfigurationError(
        f"{found.name} {which}.{more} All ranks have to train with the same module, data and settings. Look for code "
        "that depends on the rank, an environment variable or a seed that is not the same everywhere."
    )
