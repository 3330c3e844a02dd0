"""States of the random generators that a module and the callbacks hold, by their paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainstack.backends.generator_search import FoundGenerators, find_generators
from trainstack.backends.generators import get_generator_state, seed_generator, set_generator_state
from trainstack.backends.random_streams import Place, RandomStreams
from trainstack.errors import PrivacyError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.fingerprints import hash_text, hash_value
from trainstack.trainer.core.order import mix

GENERATORS = "generators"
"""The key of these states among the random states of a rank."""


def _find(context: RunContext) -> FoundGenerators:
    return find_generators(context.module, **context.events.callbacks)


def get_generator_states(context: RunContext) -> dict[str, Any]:
    """The states of all generators that a search of the module and the callbacks finds, by path."""
    return {path: get_generator_state(one) for path, one in _find(context).by_path.items()}


def without_generators(old: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What `OldState.differing` returned, less what belongs to generators; None for nothing."""
    if old is None:
        return None
    values = [[path, value] for path, value in old["values"] if path[0] != GENERATORS]
    kept = {**old, "values": values, "added": [path for path in old["added"] if path[0] != GENERATORS]}
    return kept if any(kept.values()) else None


def put_back_generators(context: RunContext, states: Mapping[str, Any]) -> list[str]:
    """Give the generators their states; returns the paths on which the two sides do not agree."""
    found = _find(context).by_path
    failed = sorted(found.keys() ^ states.keys())
    for path, generator in found.items():
        if path in states:
            try:
                set_generator_state(generator, states[path])
            except (TypeError, ValueError, RuntimeError, KeyError):
                failed.append(path)
    return failed


def renew_generators(context: RunContext, streams: RandomStreams, *place: Place) -> None:
    """Seed the generators of the process, the module and the callbacks in a private run, from the operating system.

    With a debug seed they get the numbers of a place in the run. Earlier seeds have no effect.

    Raises:
        PrivacyError: one of them cannot be seeded.
    """
    rank, own = context.world.rank, _find(context).by_path
    now = RandomStreams.from_system() if streams.is_secret else streams
    for position, (path, generator) in enumerate(own.items()):
        try:
            now.seed_each([generator], *place, rank, position)
        except Exception as error:
            raise PrivacyError(
                f"{path} ({type(generator).__name__}) cannot be seeded, so its random numbers may be known outside: "
                f"{type(error).__name__}: {error}. Use torch.Generator(), numpy.random.default_rng() or "
                "random.Random()."
            ) from error
    now.seed_all(context.world.device, (), *place, rank)


def restore_generators(context: RunContext, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Let the generators of the module and the callbacks go on as the checkpoint says; all ranks call it.

    With another number of ranks, generators that are equal on all of them, then and now, go on as they are. The others
    are seeded anew by the seed of the run, the step and the rank, as the generators of the process are. A private run
    seeds all of them when training begins.

    Args:
        context: the context of the run.
        ranks: the random states of the ranks that wrote the checkpoint.
    """
    world, state = context.world, context.state
    saved = [rank.get(GENERATORS) or {} for rank in ranks]
    if not saved or context.stack.is_private:
        return
    if len(saved) == world.size:
        failed = put_back_generators(context, saved[world.rank])
    else:
        mine = _find(context).by_path
        digests = {path: hash_value(get_generator_state(one)) for path, one in mine.items()}
        live = world.comm.gather(digests, "the random generators")
        shared = [
            path
            for path in mine
            if all(rank.get(path) == digests[path] for rank in live)
            and len({hash_value(r.get(path)) for r in saved}) == 1
        ]
        failed = put_back_generators(context, saved[0])
        own = sorted(mine.keys() - shared)
        for path in own:
            seed_generator(mine[path], mix(state.seed, state.global_step, world.size, world.rank, _number(path)) >> 1)
        if own:
            context.log.warning(
                f"the generators {', '.join(own)} differ between the ranks, and the checkpoint has those of "
                f"{len(saved)} rank{'s' * (len(saved) > 1)}. Each of the {world.size} ranks seeds them again, by the "
                "seed of the run, the step and the rank."
            )
    if failed:
        context.log.warning(
            f"the module and the callbacks do not hold the random generators that they held when the checkpoint was "
            f"written: {', '.join(failed)}. They go on as they were made. Make the same ones in __init__."
        )


def _number(path: str) -> int:
    return int(hash_text(path), 16) >> 1


def warn_of_unreachable(context: RunContext) -> None:
    """Name the generators that no checkpoint can hold."""
    found = _find(context)
    if found.without_state:
        context.log.warning(
            f"{', '.join(found.without_state)}: random numbers of the operating system have no state, so a resumed run "
            "draws others. Use random.Random, numpy.random.default_rng or torch.Generator."
        )
    if found.unsearched:
        context.log.warning(
            f"in the module and the callbacks, {found.describe_unsearched()}: too large or too deep to be "
            "searched whole for random generators. Those that were not found are not saved: return their states from "
            "get_state."
        )
