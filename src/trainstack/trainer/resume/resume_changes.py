"""The changes between a checkpoint and the start that resumes it: their table, their record, and `strict_resume`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainstack.checkpointing import Checkpoint
from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.changes import Change, Description, changes_between, flat, remedies, table_of
from trainstack.trainer.core.effects import Effect
from trainstack.trainer.core.fingerprints import hash_text
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.data.fixed_samples import Samples, random_places
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.start_description import describe_data, merge_environments

START = "start"
"""The key in a checkpoint's metadata of the description of the start that wrote it; see `describe_start`."""


def changes_at_resume(
    checkpoint: Checkpoint, context: RunContext, plan: TrainingPlan, given: Description
) -> list[Change]:
    """The items that differ between `checkpoint` and this start, without those of optimizers. All ranks call this.

    The training data are compared when an epoch begins, except for their number.
    """
    environment = merge_environments(context.world.comm.gather(given["environment"], "resuming"))
    now = flat({**given, "environment": environment, "data": _planned(given["data"])})
    before = _saved_items(checkpoint, context)
    if START not in (checkpoint.metadata or {}):  # the checkpointer does not store metadata
        now = {name: text for name, text in now.items() if name in before}
    found = [_with_seed_kept(change) for change in changes_between(before, now)]
    if context.args.fit_micro_batch:  # the micro-batch is determined when training begins
        found = [change for change in found if change.name != "data.micro-batch"]
    length, new_length = (checkpoint.plan or {}).get("samples_per_epoch"), plan.samples_per_epoch
    if None not in (length, new_length) and length != new_length and not context.state.steps_in_epoch:
        name = "data.samples in an epoch"
        found += changes_between({name: str(length)}, {name: str(new_length)})
    if context.args.reset_optimizers_schedulers:
        remedy = "remove reset_optimizers_schedulers"
        kept, made = "as saved", "new"
        found.append(Change(name="optimizers", saved=kept, given=made, effect=Effect.OTHER_RUN, remedy=remedy))
    return found


_PLANNED = ("global batch", "micro-batch")


def _planned(data: Mapping[str, str]) -> dict[str, str]:
    """The items of `data` that do not depend on the epoch."""
    return {name: data[name] for name in _PLANNED if name in data}


def _saved_items(checkpoint: Checkpoint, context: RunContext) -> dict[str, str]:
    facts, planned = checkpoint.metadata or {}, checkpoint.plan or {}
    start = facts.get(START) or {}
    items = flat({**start, "data": _planned(start.get("data") or {})})
    items |= {"arguments.seed": str(context.state.seed)}
    items |= {"data.global batch": str(planned["global_batch"])} if "global_batch" in planned else {}
    ranks = (checkpoint.rng_state or {}).get("ranks", ())
    items |= {"environment.world size": str(len(ranks))} if ranks else {}
    return items | ({"arguments.backend": repr(facts["backend"])} if "backend" in facts else {})


def _with_seed_kept(change: Change) -> Change:
    return replace(change, effect=Effect.NOT_USED) if change.name == "arguments.seed" else change


def report_changes(changes: Sequence[Change], context: RunContext, *, complete: bool = False) -> None:
    """Log the table of `changes`, or refuse them. All ranks call this with the same changes.

    Args:
        changes: the changes since the checkpoint.
        context: the context of the run.
        complete: whether the comparison was complete, so that without changes a line says that nothing has changed.

    Raises:
        CheckpointMismatchError: a change makes the resume inexact, and `strict_resume` is set.
    """
    when = f"the checkpoint at global step {context.state.global_step}"
    breaking = [change for change in changes if change.effect.breaks_exactness]
    cure = "; ".join(remedies(breaking))
    if breaking and context.args.strict_resume:
        rows = "; ".join(f"{c.name} was {c.saved} and is {c.given} ({c.effect.value})" for c in breaking)
        raise CheckpointMismatchError(
            f"strict_resume=True, and the run would not continue exactly from {when}: {rows}. To continue exactly: "
            f"{cure}. To continue with these differences, remove strict_resume."
        )
    context.changes += changes
    if changes:
        table = f"changed since {when} was written:\n{table_of(changes)}"
        advice = f"\n  To keep the saved values: {cure}." if cure else ""
        (context.log.warning if breaking else context.log.info)(table + advice)
    elif complete:
        context.log.info(f"nothing has changed since {when} was written.")
    note_changes(context)


def note_changes(context: RunContext) -> None:
    """On the main process, write the changes into the folder of the run, if the folder is claimed."""
    if context.world.is_main:
        context.directory.note_changes(context.state.global_step, context.changes)


# --- the training data


SAMPLES = "samples"
"""The key in a checkpoint's metadata of the hashes of three fixed samples of the dataset."""


def hash_samples(samples: Samples) -> dict[str, str]:
    """The hash of each sample, for the metadata of a checkpoint."""
    return {index: hash_text(repr(numbers)) for index, numbers in samples.items()}


def comparable_samples(data: TrainingData, *, within: bool) -> dict[str, str]:
    """The hashes of samples for a checkpoint `within` an epoch, or between two.

    Between epochs the result is empty if the samples have changed during the run, because they may change again.
    """
    return hash_samples(data.epoch_hashes) if within or data.epoch_hashes == data.sample_hashes else {}


def changes_of_data(
    metadata: Mapping[str, Any], data: TrainingData, context: RunContext, *, within: bool
) -> list[Change]:
    """The items in which the data of an epoch differ from those of the resumed checkpoint.

    Classes, order and code are only compared `within` an epoch, because the hooks of the next epoch may choose other
    data.

    Args:
        metadata: the metadata of the checkpoint.
        data: the training data, after the call for the data of the epoch.
        context: the context of the run.
        within: whether the checkpoint was written within the epoch.
    """
    found = list[Change]()
    if within:
        before = (metadata.get(START) or {}).get("data") or {}
        now = describe_data(data, private=context.stack.is_private)
        both = [name for name in before if name in now and name not in (*_PLANNED, "length of the data set")]
        found = changes_between({f"data.{n}": before[n] for n in both}, {f"data.{n}": now[n] for n in both})
    return found + _other_samples(metadata.get(SAMPLES) or {}, data, context, within=within)


def _other_samples(before: Mapping[str, str], data: TrainingData, context: RunContext, *, within: bool) -> list[Change]:
    known = [hash_samples(data.epoch_hashes), *([] if within else [hash_samples(data.sample_hashes)])]
    if any(all(now.get(i, one) == one for i, one in before.items()) for now in known):
        return []
    random, is_unchanged = random_places(data.loader, context.state.seed)
    now = known[0]
    differing = [index for index, one in before.items() if now.get(index, one) != one and not random.get(index)]
    remedy = "list files in a fixed order (sorted), and use the same data and preprocessing"
    rows = [
        Change(name=f"data.sample {i}", saved=before[i], given=now[i], effect=Effect.OTHER_RUN, remedy=remedy)
        for i in differing
    ]
    return rows if is_unchanged else []
