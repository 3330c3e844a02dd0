"""Checks of the training data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainstack.trainer.data.step_batches import describe_order
from trainstack.verifying.script_checks.evidence import Evidence, tensors_of
from trainstack.verifying.script_checks.findings import Found, check

_ENOUGH_LABELS = 32
"""Fewer labels than this say nothing about their order or their variety."""
_PIXELS = 32.0
"""Whole numbers up to 255 are pixels if the largest exceeds this; smaller ones may be counts."""
_LARGE = 1000.0


@check("D101", "problem", "inputs that are inf or nan")
def nonfinite_inputs(evidence: Evidence) -> Iterator[Found]:
    """Values of the first batches."""
    for batch in evidence.batches:
        bad = [one for one in tensors_of(batch) if one.is_floating_point() and not bool(torch.isfinite(one).all())]
        if bad:
            yield (
                f"a training batch has inf or nan in a tensor of shape {tuple(bad[0].shape)}",
                "Replace or drop these values in the data set: torch.nan_to_num, or a filter of the samples.",
                evidence.method_place("get_train_dataloader"),
            )
            return


@check("D102", "hint", "inputs that are not scaled, such as pixels from 0 to 255")
def unscaled_inputs(evidence: Evidence) -> Iterator[Found]:
    """The input of the first layer with weights."""
    seen = evidence.layer_input
    if seen is None:
        return
    pixels = seen.is_whole and seen.low >= 0 and _PIXELS < seen.high <= 255
    if pixels or max(abs(seen.low), abs(seen.high)) > _LARGE:
        what = "whole numbers" if seen.is_whole else "values"
        yield (
            f"the first layer ({seen.name}) gets {what} from {seen.low:g} to {seen.high:g}",
            "Scale them in the data set: x / 255 for pixels, (x - mean) / std for other values.",
        )


@check("D104", "problem", "labels that are sorted, in data set order")
def sorted_labels(evidence: Evidence) -> Iterator[Found]:
    """Without a shuffle each batch then has samples of one class."""
    labels = evidence.labels()
    if len(labels) < _ENOUGH_LABELS or len(set(labels)) < 2 or not _is_sequential(evidence):
        return
    if labels in (sorted(labels), sorted(labels, reverse=True)):
        yield (
            "the training data comes in data set order, and its labels are sorted: a batch has samples of one class",
            "Pass the sampler on: DataLoader(dataset, batch_size, sampler=sampler(dataset)).",
            evidence.method_place("get_train_dataloader"),
        )


@check("D105", "hint", "training data that is not shuffled")
def unshuffled(evidence: Evidence) -> Iterator[Found]:
    """Sorted labels are D104."""
    if _is_sequential(evidence) and not list(sorted_labels(evidence)):
        yield (
            "the training data comes in data set order in each epoch",
            "Pass the sampler on, if this is not on purpose: DataLoader(..., sampler=sampler(dataset)).",
            evidence.method_place("get_train_dataloader"),
        )


def _is_sequential(evidence: Evidence) -> bool:
    loader = evidence.loader
    return evidence.data_length() > 1 and describe_order(loader) == "in data set order"


@check("D106", "problem", "labels that are all equal")
def constant_labels(evidence: Evidence) -> Iterator[Found]:
    """Labels of up to 256 samples that are spread over the data set."""
    labels = evidence.labels()
    if len(labels) >= _ENOUGH_LABELS and len(set(labels)) == 1:
        yield (
            f"all of {len(labels)} training samples that were read have the label {labels[0]}",
            "Look at the code that makes the labels: a model that learns nothing fits them.",
            evidence.place_of(evidence.loader.dataset),
        )


@check("D107", "problem", "labels outside of the classes, in samples that the first batches do not have")
def labels_out_of_range(evidence: Evidence) -> Iterator[Found]:
    """Compared with the width of the scores that cross_entropy gets."""
    calls = [one for one in evidence.calls if (one.name, one.stage) == ("cross_entropy", "train") and one.facts]
    labels = evidence.labels()
    if not labels or evidence.error is not None or len(calls) != 1 or len(calls[0].facts["target_shape"]) != 1:
        return
    shape, ignored = calls[0].facts["input_shape"], calls[0].facts["ignore_index"]
    wrong = sorted({one for one in labels if not 0 <= one < shape[-1] and one != ignored}) if shape[-1] > 1 else []
    seen_low, seen_high = calls[0].facts["target_low"], calls[0].facts["target_high"]
    shifted = min(labels) != seen_low and max(labels) != seen_high  # the step makes other numbers of them
    if wrong and not shifted:
        yield (
            f"training samples have the labels {', '.join(map(str, wrong[:5]))}, and the scores are for {shape[-1]} "
            "classes",
            "Number the classes from 0 to C - 1, and make the last layer as wide as their number C.",
            calls[0].place,
        )


@check("D108", "problem", "a data set that changes when it is read")
def unstable_samples(evidence: Evidence) -> Iterator[Found]:
    """A sample is read three times from the same random state."""
    if evidence.unstable is not None:
        yield (
            f"sample {evidence.unstable} has other values each time it is read, from the same random state",
            "__getitem__ changes its own data, such as an array that torch.from_numpy shares: copy it first, with "
            "array.copy() or tensor.clone().",
            evidence.place_of(getattr(type(evidence.loader.dataset), "__getitem__", None)),
        )


@check("D109", "hint", "a train_batch_size of 1, the default")
def batch_of_one(evidence: Evidence) -> Iterator[Found]:
    """`train_batch_size` counts the samples of all processes together."""
    plan = evidence.plan
    if plan is not None and plan.global_batch == 1 and evidence.data_length() > _ENOUGH_LABELS:
        yield (
            "train_batch_size is 1: each sample is one update",
            "Write TrainerArguments(train_batch_size=32) or --train_batch_size 32, unless this is on purpose.",
        )


@check("D110", "hint", "more loader workers than cores")
def too_many_workers(evidence: Evidence) -> Iterator[Found]:
    """Checks the training loader only."""
    workers, cores = getattr(evidence.loader, "num_workers", 0), os.cpu_count() or 1
    if workers > max(cores, 2):
        yield (
            f"the training loader has num_workers={workers}, and this machine has {cores} cores",
            f"Write num_workers={cores}, or take the number from os.cpu_count().",
            evidence.method_place("get_train_dataloader"),
        )


@check("D111", "hint", "a data set or collate_fn that cannot be sent to loader workers")
def unpicklable(evidence: Evidence) -> Iterator[Found]:
    """On macOS and Windows workers are new processes, which get the data set by pickle."""
    loader = evidence.loader
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    for name, value in (("dataset", loader.dataset), ("collate_fn", loader.collate_fn)):
        try:
            pickle.dumps(value)
        except Exception as error:
            yield (
                f"{name} of the training loader cannot be pickled ({error}), and num_workers={loader.num_workers}: "
                "this fails where workers are new processes (macOS, Windows, spawn)",
                "Write a function at the top of the file instead of a lambda or a function inside a function.",
                evidence.method_place("get_train_dataloader"),
            )


@check("D112", "problem", "padding that counts in the loss")
def padded_labels(evidence: Evidence) -> Iterator[Found]:
    """Positions that the attention mask leaves out have the label -100."""
    for batch in evidence.batches[:1]:
        if not isinstance(batch, Mapping):
            return
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        if not isinstance(mask, torch.Tensor) or not isinstance(labels, torch.Tensor) or mask.shape != labels.shape:
            return
        padding = mask == 0
        if bool(padding.any()) and not bool((labels[padding] < 0).any()):
            yield (
                "the labels at padded positions are ids of tokens, so the model learns to predict padding",
                "Write labels[attention_mask == 0] = -100 where the batch is made.",
                evidence.place_of(getattr(evidence.loader, "collate_fn", None)),
            )


@check("D113", "hint", "a padding id that is not that of the embedding")
def other_padding_id(evidence: Evidence) -> Iterator[Found]:
    """Ids at positions that the attention mask leaves out."""
    embeddings = [one for one in evidence.module.modules() if isinstance(one, nn.Embedding)]
    known = {one.padding_idx for one in embeddings if one.padding_idx is not None}
    for batch in evidence.batches[:1]:
        if not isinstance(batch, Mapping) or not known:
            return
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        if not isinstance(mask, torch.Tensor) or not isinstance(ids, torch.Tensor) or mask.shape != ids.shape:
            return
        used = set(ids[mask == 0].tolist())
        if used and not used & known:
            yield (
                f"padded positions have the ids {sorted(used)[:5]}, and the embedding has padding_idx={min(known)}",
                "Give tokenizer and model the same id: nn.Embedding(..., padding_idx=tokenizer.pad_token_id).",
            )


@check("D114", "hint", "a batch that is larger than the data set")
def batch_of_all(evidence: Evidence) -> Iterator[Found]:
    """Then an epoch is one step."""
    plan, length = evidence.plan, evidence.data_length()
    if plan is not None and plan.global_batch > length > 0 and evidence.error is None:
        yield (
            f"train_batch_size={plan.global_batch} is larger than the data set of {length} samples: an epoch is one "
            "step",
            f"Write a train_batch_size of at most {length}.",
        )
