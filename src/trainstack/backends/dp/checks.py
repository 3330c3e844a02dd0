"""Checks that refuse a run whose stated epsilon would not hold.

Each finding is a sentence with the problem and the correction. One error lists all findings.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, check_delta_for, sampling_rate
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import GradientMode, Run, rows_of
from trainstack.backends.dp.modes.probing import NoAutocast, deterministic_forward
from trainstack.backends.dp.sampling import check_records
from trainstack.backends.dp.sealed.plain_state import installed_attributes, owners_of
from trainstack.backends.dp.torch_names import BATCH_NORMS, INSTANCE_NORMS, pytree
from trainstack.backends.single_process import move_to_device
from trainstack.backends.workload import TrainingSet, Workload
from trainstack.errors import ConfigurationError


def setup_problems(work: Workload, args: DifferentialPrivacyArguments) -> list[str]:
    """The reasons why a private run cannot begin; empty if it can."""
    return [*_about_data(work.data, args), *_about_parameters(work)]


def static_problems(work: Workload) -> list[str]:
    """Faults that break the guarantee and can be found without running the module; empty if there are none."""
    problems = list(_about_modules(work.module))
    if work.data is not None and work.data.repeats > 1:
        problems.append(
            f"a record is in the data set {work.data.repeats} times, as repeated indices of a Subset or parts of a "
            f"ConcatDataset: epsilon would hold for one of these copies, and the record has {work.data.repeats} times "
            "as much influence. Take each record once, and weight its loss instead."
        )
    if work.clipping.kind == "value":
        problems.append(
            f"clip_grad_value={work.clipping.limit}: gradients are clipped once, record by record. Remove it and "
            "set per_sample_max_grad_norm in DifferentialPrivacyArguments."
        )
    return problems


def _about_data(data: TrainingSet | None, args: DifferentialPrivacyArguments) -> Iterator[str]:
    if data is None:
        yield "the stack is driven without a Trainer, but private training draws the records itself. Use a Trainer."
        return
    if data.length is None:
        yield (
            f"the training data cannot be sampled record by record, since {data.problem}. Return "
            "DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset)) over a data set with indices."
        )
        return
    if data.length < 2:
        yield f"the data set holds {data.length} record: it cannot be told from others. Train on 2 or more."
    if args.dataset_size is not None and data.length > args.dataset_size:
        yield (
            f"dataset_size={args.dataset_size}, but the data set holds {data.length} records: each would be drawn more "
            "often than accounted for. Write the larger number."
        )
    if data.total_steps is None:
        yield "the number of global steps is not known beforehand. Write max_train_steps_per_epoch."
    records = max(1, data.length if args.dataset_size is None else args.dataset_size)
    for look in (
        lambda: sampling_rate(data.global_batch, records, args.sample_rate),
        lambda: check_delta_for(args.delta, records),
    ):
        try:
            look()
        except ConfigurationError as error:
            yield str(error)


def _about_parameters(work: Workload) -> Iterator[str]:
    names = {id(p): name for name, p in work.module.named_parameters()}
    holders: dict[int, int] = {}
    for optimizer in work.optimizers:
        for key in {id(p) for group in optimizer.param_groups for p in group["params"]}:
            holders[key] = holders.get(key, 0) + 1
    twice = [names.get(key, "?") for key, count in holders.items() if count > 1]
    if twice:
        yield (
            f"{_format_names(twice)}: in more than one optimizer, so released twice. Give each parameter to one "
            "optimizer."
        )
    loose = [names[id(p)] for p in work.parameters if p.requires_grad and id(p) not in holders]
    if loose:
        yield (
            f"{_format_names(loose)}: trainable, but in no optimizer. Give them to an optimizer, or freeze them: "
            "requires_grad_(False)."
        )
    foreign = sum(id(p) not in names for p in work.optimized_params)
    if foreign:
        yield (
            f"{foreign} parameters of the optimizers are not parameters of the module. Make the optimizer from "
            "self.parameters()."
        )
    yield from _about_shapes_and_dtypes(work, names)


def _about_shapes_and_dtypes(work: Workload, names: Mapping[int, str]) -> Iterator[str]:
    for p in work.optimized_params:
        name = names.get(id(p), "?")
        if isinstance(p, UninitializedParameter):
            yield f"{name}: has no shape yet. Run the module once on a batch before training."
    unreal = [p for p in work.optimized_params if p.is_complex()]
    if unreal:
        which = _format_names(names.get(id(p), "?") for p in unreal)
        yield (
            f"{which}: private training does not support complex parameters. Hold torch.view_as_real(parameter) as the "
            "parameter, and call torch.view_as_complex in forward."
        )
    real = [p for p in work.optimized_params if not p.is_complex()]
    coarse = [p for p in real if p.dtype not in (torch.float32, torch.float64)]
    if coarse:
        which = _format_names(names.get(id(p), "?") for p in coarse)
        dtypes = _format_names({str(p.dtype) for p in coarse})
        yield (
            f"{which}: {dtypes} is too coarse for clipping and noise. Keep parameters in float32; for half "
            "precision write backend='sp-dp-bf16'."
        )


def _about_modules(module: nn.Module) -> Iterator[str]:
    modes = {part: part.training for part in module.modules()}
    module.train()  # which a module may override; modes are put back
    training = {part: part.training for part in module.modules()}
    for part, was in modes.items():
        part.training = was
    for name, part in module.named_modules():
        kind = f"{name or 'the module'} ({type(part).__name__})"
        batch_statistics = training[part] or not getattr(part, "track_running_stats", True)
        if isinstance(part, BATCH_NORMS) and batch_statistics:
            yield (
                f"{kind}: normalises a record with its batch peers, so that no gradient belongs to one record alone. "
                "Replace it with nn.GroupNorm, or keep it in eval mode by overriding train()."
            )
        elif isinstance(part, INSTANCE_NORMS) and part.track_running_stats and training[part]:
            yield f"{kind}: keeps statistics of the records without noise. Write track_running_stats=False."
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            yield f"{kind}: max_norm changes the weights that a record uses, without noise. Remove it."
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield f"{kind}: sparse gradients show which rows were used. Write sparse=False."
        elif isinstance(part, DistributedDataParallel | DataParallel):
            yield f"{kind}: sums gradients before they are clipped. Take it off and write backend='ddp-dp'."


def _format_names(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_LOOKED_AT, _SECONDS = 300, 1.0
"""The number of records to choose from, and the time for loading them: a start may take a second longer. With a
probability of 95 %, 300 records include one of the 1 % that differ most."""


def choose_probe_records(data: TrainingSet, count: int = 6) -> Tensor:
    """Some records: indices, int64.

    The operating system draws some hundreds, which are loaded one by one. The result has the longest of them, the
    shortest, and two that differ most from those in size, in the positions of zeros and in value: a coupling of records
    is visible only if they differ, and one record in a thousand may be longer than all others. The rest is random.
    """
    assert data.length is not None
    drawn = secrets.SystemRandom().sample(range(data.length), min(_LOOKED_AT, data.length))
    traits = _traits_of(data, drawn, min(count, data.length))
    chosen = _extremes(traits)[:count]
    others = [place for place in range(len(drawn)) if place not in chosen]
    return torch.tensor(sorted(drawn[place] for place in [*chosen, *others][:count]))


def _traits_of(data: TrainingSet, drawn: list[int], at_least: int) -> list[list[float]]:
    """Numbers that tell records apart, for as many of `drawn` as time allows; the first one is the size."""
    until = time.monotonic() + _SECONDS
    traits: list[list[float]] = []
    for index in drawn:
        if len(traits) >= at_least and time.monotonic() > until:
            break
        leaves = [list(_of_leaf(leaf)) for leaf in pytree.tree_leaves(data.fetch(torch.tensor([index])))]
        traits.append([sum(leaf[0] for leaf in leaves), *(trait for leaf in leaves for trait in leaf)])
    return traits


def _of_leaf(leaf: Any) -> Iterator[float]:
    """Its size, how much of it is not zero, and its mean."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        leaf = torch.from_numpy(leaf)
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_complex():
        values = leaf.detach().cpu().double()  # MPS has no float64
        yield from (leaf.numel(), int(values.count_nonzero()), float(values.mean()) if leaf.numel() else 0.0)
    elif isinstance(leaf, int | float):
        yield from (1, leaf != 0, float(leaf))
    else:
        size = len(leaf) if hasattr(leaf, "__len__") else 0
        yield from (size, size, 0.0)


def _extremes(traits: list[list[float]]) -> list[int]:
    """The places of the largest, of the smallest, and then of the one farthest from all those before."""
    width = max(map(len, traits))
    table = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in traits], dtype=torch.float64).nan_to_num()
    span = table.amax(0) - table.amin(0)
    table = (table - table.amin(0)) / torch.where(span > 0, span, 1.0)
    chosen = list(dict.fromkeys([int(table[:, 0].argmax()), int(table[:, 0].argmin())]))
    while len(chosen) < 4:
        apart = torch.cdist(table, table[chosen]).amin(1)
        if float(apart.max()) == 0.0:
            break
        chosen.append(int(apart.argmax()))
    return chosen


# The neighbour probe compares the clipped sum over a batch with that over the same batch without one record, as the
# loader would have collated it. For every record, their difference must be no longer than the clipping norm. The probe
# uses a norm so small that every gradient is clipped: then the smallest coupling between records is visible, except one
# that only changes the length of gradients. That is visible without clipping: the sum over records must be that of each
# alone. The idea is that of record-level testing in Re:cord-play (arXiv 2602.17454).
TOLERANCE = 1e-3
"""The tolerance for rounding: a record may move the sum by this much more than the clipping norm, and gradients of all
records together may differ from those of each alone by this part of their size."""

_INSTEAD = (
    "Let the loss be a mean over records that depend on themselves alone: no statistics over the batch, no division by "
    "contents of the batch or by the length to which it was padded. Random numbers that collate_fn draws look like "
    "that too, since they belong to places in the batch: draw them in train_step or in the data set."
)
_NO_LIMIT = float(torch.finfo(torch.float32).max) ** 0.5


def neighbour_problems(mode: GradientMode, run: Run, data: TrainingSet, index: Tensor) -> Iterator[str]:
    """Findings of the neighbour probe on the records `index`, in sentences; none if each has a bounded influence."""
    clipper = mode.clipper
    try:
        in_full = partial(_clipped_sum, mode, lambda model, batch: run(NoAutocast(model), batch), data)
        yield from _problems(partial(_clipped_sum, mode, run, data), in_full, index)
    finally:
        mode.pop_sums()
        mode.clipper = clipper


def _problems(sum_of: partial[Tensor], in_full: partial[Tensor], index: Tensor) -> Iterator[str]:
    alone = in_full(index[:1], _NO_LIMIT)  # the sum over the gradients of single records
    norms = [float(alone.norm())]
    for i in range(1, len(index)):
        gradient = in_full(index[i : i + 1], _NO_LIMIT)
        norms.append(float(gradient.norm()))
        alone += gradient
    # A hundredth of the shortest gradient among the records that have one: then every gradient is clipped.
    limit = min((norm for norm in norms if norm > 0), default=0.0) / 100
    if limit == 0.0:
        yield (
            "no record has a gradient alone: the loss is nan or inf, or it only compares records with each other. "
            "Write a loss that is a mean of one value for each record."
        )
        return
    whole = sum_of(index, limit)
    for left_out in range(len(index)):
        others = torch.cat([index[:left_out], index[left_out + 1 :]])
        moved = float((whole - sum_of(others, limit)).norm()) / limit
        if moved > 1 + TOLERANCE:
            yield (
                f"the gradients of other records change when one is left out (its influence is {moved:.3f} times the "
                f"clipping norm), so clipping does not bound it. {_INSTEAD}"
            )
            return
    apart = float((in_full(index, _NO_LIMIT) - alone).norm()) / math.hypot(*norms)
    if apart > TOLERANCE:
        yield (
            f"records have other gradients together than alone (their sum differs by {apart:.3f} times its "
            f"size), so clipping does not bound the influence of one. {_INSTEAD}"
        )


def _clipped_sum(mode: GradientMode, run: Run, data: TrainingSet, index: Tensor, limit: float) -> Tensor:
    """The sum of clipped gradients of some records, as training would have it."""
    mode.clipper = FlatClipper(limit)
    batch = move_to_device(data.fetch(index), mode.trained[0].device)
    check_records(batch, len(index))
    with deterministic_forward(mode.module) as states, installed_attributes(owners_of(mode.module)):
        if mode.one_by_one:
            for i in range(len(index)):
                states.restore()  # with the same random numbers, however many records come before it
                mode.add(run, rows_of(batch, len(index), slice(i, i + 1)), 1)
        else:
            mode.add(run, batch, len(index))
    return mode.pop_flat_sums()[0]
