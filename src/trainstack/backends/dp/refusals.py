"""What private training refuses on sight: everything without which the stated epsilon would not be true.

Each finding is a sentence that names what was found and says what to write instead; all are told together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.plan import check_delta_for, sampling_rate
from trainstack.backends.dp.torch_names import BATCH_NORMS, INSTANCE_NORMS
from trainstack.backends.sampling import TrainingSet
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError


def impossible(work: Workload, args: DifferentialPrivacyArguments) -> list[str]:
    """Why a private run cannot even be begun; empty if it can."""
    return [*_about_data(work.data, args), *_about_parameters(work)]


def unsafe(work: Workload) -> list[str]:
    """What can be seen to break the guarantee without running the module; empty if nothing is."""
    return [*_about_modules(work.module), *_about_clipping(work)]


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
        yield f"{_listed(twice)}: in more than one optimizer, so released twice. Give each parameter to one optimizer."
    loose = [names[id(p)] for p in work.parameters if p.requires_grad and id(p) not in holders]
    if loose:
        yield (
            f"{_listed(loose)}: trainable, but in no optimizer. Give them to an optimizer, or freeze them: "
            "requires_grad_(False)."
        )
    foreign = sum(id(p) not in names for p in work.trained)
    if foreign:
        yield (
            f"{foreign} parameters of the optimizers are not parameters of the module. Make the optimizer from "
            "self.parameters()."
        )
    yield from _about_shapes_and_dtypes(work, names)


def _about_shapes_and_dtypes(work: Workload, names: Mapping[int, str]) -> Iterator[str]:
    for p in work.trained:
        name = names.get(id(p), "?")
        if isinstance(p, UninitializedParameter):
            yield f"{name}: has no shape yet. Run the module once on a batch before training."
    coarse = [p for p in work.trained if p.dtype not in (torch.float32, torch.float64)]
    if coarse:
        which, dtypes = _listed(names.get(id(p), "?") for p in coarse), _listed({str(p.dtype) for p in coarse})
        yield (
            f"{which}: {dtypes} is too coarse for clipping and noise. Keep parameters in float32; half precision is "
            "what backend='sp-dp-bf16' is for."
        )


def _about_modules(module: nn.Module) -> Iterator[str]:
    training = _training_flags(module)
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
            yield f"{kind}: max_norm changes the weights that a record uses, without noise. Leave it out."
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield f"{kind}: sparse gradients show which rows were used. Write sparse=False."
        elif isinstance(part, DistributedDataParallel | DataParallel):
            yield f"{kind}: sums gradients before they are clipped. Take it off and write backend='ddp-dp'."


def _training_flags(module: nn.Module) -> dict[nn.Module, bool]:
    """Which modules are in training mode once training begins; modes are put back."""
    before = {part: part.training for part in module.modules()}
    module.train()
    flags = {part: part.training for part in module.modules()}
    for part, was in before.items():
        part.training = was
    return flags


def _about_clipping(work: Workload) -> Iterator[str]:
    if work.clipping.kind == "value":
        yield (
            f"clip_grad_value={work.clipping.limit}: gradients are clipped once, record by record. Leave it out and "
            "set per_sample_max_grad_norm in DifferentialPrivacyArguments."
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
