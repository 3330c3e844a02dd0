"""`python -m tools.scale`: the tables of docs/scaling.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from tools.scale import message_costs as messages
from tools.scale.store_costs import StoreCost, failure, rendezvous

RANKS = (8, 64, 1000, 10_000)
SPREAD_S = 10.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--largest-counted", type=int, default=256, help="the most ranks in threads; costs of more are computed"
    )
    parser.add_argument("--seconds", action="store_true", help="also time exchanges in 2, 4 and 8 processes")
    options = parser.parse_args(arguments)
    largest = options.largest_counted
    _print_store(
        "rendezvous, arrivals within 10 s", rendezvous_before, _counted(partial(rendezvous, spread_s=SPREAD_S), largest)
    )
    _print_store("one rank ends without a message", failure_before, _counted(failure, largest))
    _print_groups()
    _print_messages()
    if options.seconds:
        from tools.scale.seconds import table

        _say("\n" + "\n".join(table()))


def rendezvous_before(size: int) -> StoreCost:
    """The formula of 24724a0: each rank that waits makes 5 requests in each pause, rank 0 two for each missing rank."""
    pause = max(0.02, size / 5000)
    rounds = max(1.0, SPREAD_S / 2 / pause)
    requests = 5 * (size - 1) * (rounds + 1) + 2 * (size - 1)
    return StoreCost(requests=int(requests), bytes=int(requests * 60 + size * size * 230))


def failure_before(size: int) -> StoreCost:
    """The formula of 24724a0: each rank asks for each answer, waits 4 s in steps of 20 ms, and reads all places."""
    survivors = size - 1
    requests = survivors * (3 * size + 4 / 0.02)
    return StoreCost(requests=int(requests), bytes=int(requests * 60 + survivors * size * 150), lines=survivors * 9)


def _counted(count: Callable[[int], StoreCost], largest: int) -> list[tuple[int, StoreCost, str]]:
    """Costs counted up to `largest` ranks. For more ranks, requests and lines are proportional, and bytes a polynomial.

    The polynomial has the number of ranks and its square, because each rank reads the values of all.
    """
    found = {size: count(size) for size in sorted({*(size for size in RANKS if size <= largest), largest})}
    low, high = found[min(found)], found[largest]
    costs = []
    for size in RANKS:
        if size in found:
            costs.append((size, found[size], "counted"))
            continue
        slope = (high.bytes / largest - low.bytes / min(found)) / (largest - min(found))
        rest = low.bytes / min(found) - slope * min(found)
        cost = StoreCost(
            requests=high.requests * size // largest,
            bytes=int(max(0.0, slope) * size**2 + rest * size),
            lines=high.lines * size // largest,
        )
        costs.append((size, cost, "computed"))
    return costs


def _print_store(title: str, before: Callable[[int], StoreCost], after: list[tuple[int, StoreCost, str]]) -> None:
    _say(f"\n{title}; all ranks together; 'before' by its formula\n")
    _say("| ranks | requests before | requests | bytes before | bytes | lines before | lines | how |")
    _say("|---|---|---|---|---|---|---|---|")
    for size, cost, how in after:
        old = before(size)
        lines = f"{old.lines:,} | {cost.lines:,}" if cost.lines else "- | -"
        _say(f"| {size:,} | {old.requests:,} | {cost.requests:,} | {old.bytes:,} | {cost.bytes:,} | {lines} | {how} |")


def _print_groups() -> None:
    """A rank reads all addresses in a mesh of gloo, and writes one in a lazy group (torch 2.13.0, 2 to 64 ranks)."""
    _say("\na process group of gloo: each rank\n")
    _say("| ranks | store requests before | now | connections before | now, after the exchanges of a run |")
    _say("|---|---|---|---|---|")
    for size in RANKS:
        lazy = size > 64
        pairs = 2 * messages.merge(size).messages if lazy else size - 1
        requests = 1 + 2 * pairs if lazy else 2 * size + 1
        _say(f"| {size:,} | {2 * size + 1:,} | at most {requests:,} | {size - 1:,} | at most {pairs:,} |")


def _print_messages() -> None:
    _say("\nmessages of the rank that sends most, in sequence, and their bytes\n")
    _say("| ranks | token weights before | now | log point before | now | failure check of a save before | now |")
    _say("|---|---|---|---|---|---|---|")
    for size in RANKS:
        cells = [
            messages.sum_before(size),
            messages.merge(size),
            messages.gather_before(size, 400),
            messages.gather(size, 400),
            messages.gather_before(size, 0),
            messages.merge(size),
        ]
        _say(f"| {size:,} | " + " | ".join(f"{cell.messages:,}, {cell.bytes:,} B" for cell in cells) + " |")
    _say(
        "\nevaluation of 1e6 samples in batches of 32, 1,000 classes, one float32 row of logits per sample: each rank\n"
    )
    _say("| ranks | metric updates before | now, merged | outputs: bytes received, True | 'main', others | 'own' |")
    _say("|---|---|---|---|---|---|")
    batches, total = 31_250, 1_000_000 * 4000
    for size in RANKS:
        own = -(-batches // size)
        others = total // size
        _say(f"| {size:,} | {batches:,} | {own:,} | {total - others:,} | 0 (sends {others:,}) | 0 |")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
