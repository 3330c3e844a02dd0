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
    """The states of all generators in the module and the callbacks, by path."""
    return {path: get_generator_state(one) for path, one in _find(context).by_path.items()}


def without_generators(old: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The result of `OldState.differing` without the entries of generators; None if nothing is left."""
    if old is None:
        return None
    values = [[path, value] for path, value in old["values"] if path[0] != GENERATORS]
    kept = {**old, "values": values, "added": [path for path in old["added"] if path[0] != GENERATORS]}
    return kept if any(kept.values()) else None


def put_back_generators(context: RunContext, states: Mapping[str, Any]) -> list[str]:
    """Set the states of the generators. Returns the paths that are on one side only, or whose state does not fit."""
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
    """In a private run, seed the generators of the process, the module and the callbacks from the operating system.

    With a debug seed, the seeds depend on a place in the run. Earlier seeds have no effect.

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
                f"{path} ({type(generator).__name__}) cannot be seeded, so its random numbers may not be secret: "
                f"{type(error).__name__}: {error}. Use torch.Generator(), numpy.random.default_rng() or "
                "random.Random()."
            ) from error
    now.seed_all(context.world.device, (), *place, rank)


def restore_generators(context: RunContext, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Restore the generators of the module and the callbacks from the checkpoint. All ranks call this together.

    With another number of ranks, generators that were and are equal on all ranks are restored. The others are seeded
    from the seed of the run, the step and the rank, like the generators of the process. A private run seeds all of them
    when training begins.

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
            # 63 bits are the same number with and without a sign
            seed_generator(mine[path], mix(state.seed, state.global_step, world.size, world.rank, _number(path)) >> 1)
        if own:
            context.log.warning(
                f"the generators {', '.join(own)} differ between the ranks, and the checkpoint has those of "
                f"{len(saved)} rank{'s' * (len(saved) > 1)}. Each of the {world.size} ranks seeds them again from the "
                "seed of the run, the step and the rank."
            )
    if failed:
        context.log.warning(
            f"the module and the callbacks have other random generators than when the checkpoint was written: "
            f"{', '.join(failed)}. These keep their initial states. Create the same ones in __init__."
        )


def _number(path: str) -> int:
    return int(hash_text(path), 16) >> 1  # a change of this number would change the seeds of resumed runs


def warn_of_unreachable(context: RunContext) -> None:
    """Warn of generators that no checkpoint can store."""
    found = _find(context)
    if found.without_state:
        context.log.warning(
            f"{', '.join(found.without_state)}: random numbers of the operating system have no state, so a resumed run "
            "draws others. Use random.Random, numpy.random.default_rng or torch.Generator."
        )
    if found.unsearched:
        context.log.warning(
            f"in the module and the callbacks, {found.describe_unsearched()}: too large or too deep to be searched "
            "completely for random generators. Generators that were not found are not saved: return their states from "
            "get_state."
        )
