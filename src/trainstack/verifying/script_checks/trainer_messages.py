"""Messages and errors of the trainer and of torch, as findings with an id.

The trainer checks much in each run. These checks are not repeated here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

from trainstack.errors import TrainstackError
from trainstack.verifying.script_checks.evidence import Evidence
from trainstack.verifying.script_checks.findings import CHECKS, Finding, declare


class _Row(NamedTuple):
    """A message with its check.

    Attributes:
        id: of the check.
        pattern: is searched in the message.
        method: of the module whose place is shown; "" for none.
        remedy: for messages that have none.
    """

    id: str
    pattern: str
    method: str
    remedy: str = ""


declare("D201", "problem", "layers in a list or dict, which PyTorch does not register")
declare("D202", "problem", "parameters in no optimizer, in two optimizers, or of another model")
declare("D203", "problem", "trainable parameters that get no gradient")
declare("D204", "hint", "a network in eval mode when training begins")
declare("D205", "problem", "an input whose shape does not fit the layer")
declare("D206", "problem", "an index outside of an embedding: ids and vocabulary do not fit")
declare("D103", "problem", "a loader that gives no batch, such as with drop_last")
declare("D301", "problem", "train_step returns no loss that can be trained")
declare("D302", "problem", "a loss that is a sum over samples")
declare("D309", "problem", "targets of another dtype or shape than the loss takes")
declare("D310", "problem", "labels outside of the classes")
declare("D401", "problem", "backward(), step() or zero_grad() called by hand")
declare("D402", "problem", "a schedule that was made for another number of steps")
declare("D501", "problem", "val_step returns no loss")
declare("D502", "problem", "a metric that is fed with the wrong values, or a method with a misspelt name")
declare("D601", "problem", "another error of the script")
declare("D602", "hint", "another message of the trainer")

_ROWS = (
    _Row("D201", "which PyTorch does not register", "__init__"),
    _Row("D202", "are in no optimizer|in no optimizer of the trainer", "get_optimizers_schedulers",
         "Pass self.parameters() to the optimizer, or freeze them with requires_grad_(False)."),
    _Row("D202", r"holds \d+ parameters that|empty parameter list|duplicate parameters", "get_optimizers_schedulers",
         "Pass each parameter of the module to one optimizer, once."),
    _Row("D203", "received no gradient", "train_step"),
    _Row("D204", "had trainable parameters in eval mode", "__init__",
         "Write keep_modes = True in the module if these parts have to stay in eval mode."),
    _Row("D205", "shapes cannot be multiplied|expected input.*to have .* channels|Given groups=|"
         "must match the size of tensor|size mismatch", "",
         "Print the shape of the input of this layer, and make the layer for it."),
    _Row("D206", "index out of range in self", "",
         "Make the embedding as large as the vocabulary of the tokenizer: nn.Embedding(len(tokenizer), ...)."),
    _Row("D103", "leaves no global step|gave no batch at all|empty data set", "get_train_dataloader"),
    _Row("D302", "seems to return a sum", "train_step"),
    _Row("D309", "multi-target not supported|0D or 1D target tensor expected|expected (scalar type|target dtype)|"
         "Expected floating point type for target|not implemented for '(Int|Float|Long|Double)'|"
         "Target size .* must be the same|result type .* can't be cast", "train_step",
         "cross_entropy takes class indices of dtype int64 and shape (N,); binary_cross_entropy_with_logits and "
         "mse_loss take floating targets of the shape of the input."),
    _Row("D309", r"Using a target size \(.*\) that is different to the input size", "train_step",
         "The two shapes are broadcast, which compares each sample with all others. Give both the same shape: "
         "output.squeeze(1), or target.unsqueeze(1)."),
    _Row("D310", r"Target -?\d+ is out of bounds|class values must be|all elements of (input|target) should be between",
         "train_step", "Number the classes from 0 to C - 1, and make the last layer as wide as their number C."),
    _Row("D301", "in which there is no loss|without a gradient graph|a loss is one number|no gradient flows|"
         "returned the number|first item is the loss|does not require grad", "train_step"),
    _Row("D314", "^the (loss|gradient).* (is|are|has) .*(nan|inf)", "train_step",
         "Look for log(0), a division by 0, inputs that are not scaled, or a learning rate that is too high."),
    _Row("D401", "itself in global step|backward through the graph a second time", "train_step",
         "Return the loss, and leave backward(), step() and zero_grad() to the trainer."),
    _Row("D402", r"was made (for|with)|It steps once after each global step", "get_optimizers_schedulers"),
    _Row("D501", "no loss was found", "val_step"),
    _Row("D502", "would compare it with the labels|is never called by the trainer|is not a hook", ""),
)  # fmt: skip
_EXPECTED = (
    "the training data has the loader's order",
    "backend",
    "seed",
    "saved",
    "train_batch_size=1: each update",  # D109 reports it
)
"""Beginnings of messages that tell of no mistake."""


def findings_of_messages(evidence: Evidence) -> Iterator[Finding]:
    """A finding for each warning, and for each message of a lower level that the table has."""
    for level, text in evidence.messages:
        row = _row_of(text)
        if row is not None:
            yield _finding(evidence, row, text)
        elif level >= logging.WARNING and not text.startswith(_EXPECTED):
            yield Finding("D602", CHECKS["D602"].level, *_parts(text, ""))
    for text, place in evidence.warnings:
        row = _row_of(text)
        if row is not None:
            yield _finding(evidence, row, text, place)


def findings_of_error(evidence: Evidence, place: str) -> Iterator[Finding]:
    """The finding for the error that has ended the dry run."""
    error = evidence.error
    text = str(error)
    row = _row_of(text) or next((row for note in getattr(error, "__notes__", ()) if (row := _row_of(note))), None)
    if row is not None:
        yield _finding(evidence, row, text, place)
        return
    kind = "" if isinstance(error, TrainstackError) else f"{type(error).__name__}: "
    notes = "; ".join(getattr(error, "__notes__", ()))
    yield Finding("D601", CHECKS["D601"].level, *_parts(f"{kind}{text}", notes or "The script fails here."), place)


def _row_of(text: str) -> _Row | None:
    return next((row for row in _ROWS if re.search(row.pattern, text)), None)


def _finding(evidence: Evidence, row: _Row, text: str, place: str = "") -> Finding:
    place = place or (evidence.method_place(row.method) if row.method else "")
    return Finding(row.id, CHECKS[row.id].level, *_parts(text, row.remedy), place)


def _parts(text: str, remedy: str) -> tuple[str, str]:
    """The message in one line, and its remedy: its last sentences where there is no other one."""
    text = " ".join(text.split())
    if remedy:
        return text, remedy
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", text)
    if len(sentences) == 1:
        return text, "See docs/troubleshooting.md."
    return " ".join(sentences[:-1]), sentences[-1]
