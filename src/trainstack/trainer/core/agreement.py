"""Comparison of values that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainstack.backends import Communicator
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.fingerprints import differing_names, hash_text

MAX_REPORTED = 8
"""Items and ranks that a message lists, so that it stays readable with hundreds of ranks."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between ranks.

    Attributes:
        name: name of the first item that differs, in the order of rank 0.
        texts: text of this item by rank; None for a rank that lacks the item.
        others: names of further items that differ, at most `MAX_REPORTED` from each rank.
        ranks: ranks whose text differs from that of rank 0.
    """

    name: str
    texts: tuple[str | None, ...]
    others: tuple[str, ...]
    ranks: tuple[int, ...]


def gather_differences(
    comm: Communicator, items: Mapping[str, str], most: int | None = None
) -> tuple[list[dict[str, str | None]], list[str]]:
    """Find the items in which ranks differ from rank 0.

    Collective: all ranks call it and get the same result. The ranks first exchange one hash of all items. If the hashes
    differ, rank 0 sends all of its items, and each rank sends those that differ from rank 0, at most `most`.

    Returns:
        The differing items of each rank, by rank, and the names of all of them in the order of rank 0.
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
    # Each report gets rank 0's text of the first item, because a rank that agrees with rank 0 did not send it.
    reports = [{name: of_main.get(name) for name in ordered[:1]} | report for report in reports]
    return reports, ordered


def find_difference(comm: Communicator, items: Mapping[str, str]) -> Difference | None:
    """Return the difference between the ranks, the same on all of them; None if all items are equal. Collective."""
    if comm.size == 1:
        return None
    reports, names = gather_differences(comm, items, MAX_REPORTED)
    if not names:  # the hashes also differ if only the order of the items differs
        return None
    texts = tuple(report[names[0]] for report in reports)
    ranks = tuple(rank for rank, text in enumerate(texts) if text != texts[0])
    return Difference(names[0], texts, tuple(names[1:]), ranks)


def describe_ranks(texts: tuple[str | None, ...]) -> str:
    """Format the texts by rank, such as "is 0.01 on ranks 0, 2 and 0.02 on rank 1"."""
    by_text: dict[str | None, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    parts = [f"{'missing' if text is None else text} on {format_ranks(ranks)}" for text, ranks in by_text.items()]
    return f"is {', '.join(parts[:-1])} and {parts[-1]}"


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Format ranks, such as "rank 3" or "ranks 0, 2, 3"; at most `MAX_REPORTED` of them."""
    shown = ", ".join(map(str, ranks[:MAX_REPORTED])) + (", ..." if len(ranks) > MAX_REPORTED else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def refuse_difference(comm: Communicator, items: Mapping[str, str], hidden: frozenset[str] = frozenset()) -> None:
    """Raise an error if the items are not equal on all ranks. Collective.

    Args:
        comm: communicator of all ranks.
        items: texts by name.
        hidden: names of items whose texts must not appear in a message.

    Raises:
        ConfigurationError: items differ. All ranks raise it; it names the first such item, the ranks and their texts.
    """
    found = find_difference(comm, items)
    if found is None:
        return
    which = describe_ranks(found.texts)
    if found.name in hidden:
        which = f"differs on {format_ranks(found.ranks)} from rank 0 (a private run does not show the values)"
    more = f" Also different: {'; '.join(found.others[:3])}." if found.others else ""  # 3: one line
    raise ConfigurationError(
        f"{found.name} {which}.{more} All ranks must train with the same module, data and settings. Look for code, an "
        "environment variable or a seed that depends on the rank."
    )
