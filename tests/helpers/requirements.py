"""The ids of `@pytest.mark.spec` in words: rows of docs/features.md, and faults of other libraries."""

from __future__ import annotations

import functools

from tools.features import PAGE, ROOT, words_of_rows

WORDS = {
    # Faults of the four libraries that users come from (F). Trainstack must not have them.
    "F102": "accumulated gradients do not leak from one epoch into the next",
    "F103": "the batch after the last step of an epoch is not fetched",
    "F104": "the order differs from epoch to epoch on several processes, too",
    "F105": "ddp runs on the CPU with gloo, in an existing group, and leaves the group at the end",
    "F106": "the micro-batch divides the batch; no sample of a global batch is lost",
    "F107": "the number of steps in an epoch is exact, and no loader is built to find it",
    "F109": "a resume restores all state",
    "F110": "a step that amp skips advances neither schedules nor counters",
    "F111": "gathered outputs have the right order and length for uneven parts",
    "F112": "outputs other than tensors are gathered, too",
    "F113": "outputs in dicts, scalars and rows of different length are collected",
    "F114": "a module without validation data trains",
    "F115": "the newest checkpoint is found, and other files are not taken for checkpoints",
    "F116": "a checkpoint gets its final name when it is complete",
    "F117": "a TensorBoard writer deletes nothing that exists",
    "F118": "layers can be stacked",
    "F119": "actions of rank 0 alone depend on the real rank",
    "F120": "every argument and hook has an effect",
    "F123": "collecting outputs takes linear time",
    "F124": "a step does not wait for the device",
    "F125": "gradient norms are logged once each",
    "F201": "the model is in training mode again after an evaluation in the middle of an epoch",
    "F202": "the reported loss does not depend on accumulation",
    "F203": "gradients are clipped once a step, not once a micro-batch",
    "F204": "a resume neither repeats nor exceeds steps",
    "F207": "an error in a callback is raised",
    "F208": "a nan never counts as the best value",
    "F209": "when one process fails, the others end as well",
    "F211": "steps are counted globally on any number of processes",
    "F212": "placeholders take arithmetic and are evaluated without eval",
    "F213": "schedules with warm-up and cool-down are continuous and restored exactly",
    "F214": "a Freezer with other than the default options freezes and unfreezes",
    "F215": "schedules by update count updates, not batches, also without validation",
    "F216": "EMA averages after each step",
    "F219": "only the main process removes checkpoints, several callbacks of a class work, no step reads the device",
    "F301": "a shuffled order differs from epoch to epoch",
    "F306": "metrics over an epoch weigh samples, not batches",
    "F309": "a CSV file continues after a resume",
    "F401": "a limit on the number of batches holds",
    "F402": "the gradients of the last batches of an epoch are used",
    "F403": "a second resume within one epoch is right",
    "F404": "a checkpoint after the last batch of an epoch does not repeat the epoch",
    "F407": "schedules and random states are in the checkpoint",
    "F408": "every callback keeps its own state",
    "F409": "a monitored metric that does not exist is named, and nan is never the best",
    "F410": "the scaler is updated once a step, with any number of optimizers",
    "F412": "an evaluation restores the mode of the model",
    "F414": "two trainers in one process do not share callbacks",
    "F415": "overfitting few batches works with metrics and without validation data",
    # Observations about Opacus (O).
    "O12": "adaptive clipping counts records with noise, and no version is used that reports too little",
    "O13": "sampling rate and denominator are written by the user and do not depend on the private data",
    "O14": "an epoch has all its steps for every sampling rate",
    "O17": "an empty history costs nothing, no noise has an infinite epsilon, and no query takes minutes",
    "O19": "the import of opacus is late and silent",
    # PyMarlin's own tests of its trainer (T) and of its trainer backend (B).
    "T2": "the size of a batch in one process",
    "T3": "the size of a batch and the number of accumulated batches under a limit",
    "T4": "the order of the hooks, and their arguments",
    "T5": "a validation without a training",
    "T6": "the estimate of steps in an epoch",
    "T7": "a run that has ended is continued",
    "B1": "one global step",
    "B2": "a validation with a limit",
    "B3": "accumulated gradients and collected outputs",
    "B4": "gradients are clipped once a step",
    "B5": "outputs in tuples, lists and dicts",
}


@functools.cache
def _rows() -> dict[str, str]:
    return words_of_rows((ROOT / PAGE).read_text(encoding="utf-8"))


def words_of(id_: str) -> str:
    """The requirement of the id."""
    return WORDS.get(id_) or _rows().get(id_, "an id without words")
