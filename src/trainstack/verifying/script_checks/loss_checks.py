"""Checks of the loss and of its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainstack.errors import NonFiniteError
from trainstack.verifying.script_checks.evidence import Call, Evidence
from trainstack.verifying.script_checks.findings import Found, check

_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


def _calls(evidence: Evidence, *names: str) -> Iterator[Call]:
    """Calls with these names, once for each place."""
    seen = set[tuple[str, str]]()
    for call in evidence.calls:
        if call.name in names and call.facts and (call.name, call.place) not in seen:
            seen.add((call.name, call.place))
            yield call


@check("D303", "problem", "softmax or log_softmax before cross_entropy")
def normalized_scores(evidence: Evidence) -> Iterator[Found]:
    """cross_entropy applies log_softmax itself."""
    return _normalized_twice(evidence, "cross_entropy", "log_softmax")


@check("D304", "problem", "sigmoid before binary_cross_entropy_with_logits")
def sigmoid_twice(evidence: Evidence) -> Iterator[Found]:
    """binary_cross_entropy_with_logits applies sigmoid itself."""
    return _normalized_twice(evidence, "binary_cross_entropy_with_logits", "sigmoid")


def _normalized_twice(evidence: Evidence, loss: str, applied: str) -> Iterator[Found]:
    for call in _calls(evidence, loss):
        if by := call.facts["normalized_by"]:
            yield (
                f"{loss} gets the output of {by}, and applies {applied} itself",
                f"Pass the scores of the last layer on, without {by}.",
                call.place,
            )


@check("D305", "problem", "nll_loss without log_softmax")
def scores_without_logarithm(evidence: Evidence) -> Iterator[Found]:
    """nll_loss takes logarithms of probabilities, which are at most 0."""
    for call in _calls(evidence, "nll_loss"):
        if call.facts["high"] > 1e-3 or call.facts["normalized_by"] in ("softmax", "sigmoid"):
            yield (
                f"nll_loss gets values up to {call.facts['high']:.3g}, and takes the output of log_softmax",
                "Write cross_entropy, which applies log_softmax, or pass scores.log_softmax(1).",
                call.place,
            )


@check("D306", "problem", "cross_entropy over one class")
def one_class(evidence: Evidence) -> Iterator[Found]:
    """Its value is always 0."""
    for call in _calls(evidence, "cross_entropy"):
        shape = call.facts["input_shape"]
        if len(shape) > 1 and shape[1] == 1:
            yield (
                f"cross_entropy gets scores of shape {shape}, one class, so the loss is always 0",
                "Write binary_cross_entropy_with_logits for two classes and one score, or make the last layer wider.",
                call.place,
            )


@check("D307", "hint", "one-hot targets for cross_entropy")
def one_hot_targets(evidence: Evidence) -> Iterator[Found]:
    """Class indices give the same loss with less memory, and metrics take them."""
    for call in _calls(evidence, "cross_entropy"):
        if call.facts["one_hot"] and call.facts["target_shape"] == call.facts["input_shape"]:
            yield (
                f"the targets of cross_entropy are one-hot, of shape {call.facts['target_shape']}",
                "Pass class indices: target.argmax(1), of dtype int64.",
                call.place,
            )


@check("D308", "problem", "output and target whose shapes are broadcast")
def broadcast_targets(evidence: Evidence) -> Iterator[Found]:
    """Each output is then compared with the targets of other samples."""
    for call in _calls(evidence, *_ELEMENTWISE):
        one, other = call.facts["input_shape"], call.facts["target_shape"]
        if one != other and math.prod(one) == math.prod(other) > 1:
            yield (
                f"{call.name} gets an output of shape {one} and a target of shape {other}, which are broadcast: each "
                "output is compared with all targets",
                "Give both the same shape: output.squeeze(1), or target.unsqueeze(1).",
                call.place,
            )


@check("D311", "problem", "a loss that does not depend on the batch")
def independent_loss(evidence: Evidence) -> Iterator[Found]:
    """The loss is computed again with other values in one item of the batch at a time."""
    used = evidence.responses
    if len(used) > 1 and not any(used.values()):
        yield (
            "the loss is the same for other inputs and labels",
            "Compute it from the output of the network for this batch.",
            evidence.method_place("train_step"),
        )


@check("D312", "hint", "an item of the batch that the loss does not depend on")
def unused_item(evidence: Evidence) -> Iterator[Found]:
    """Such as labels that the step does not use."""
    used = evidence.responses
    if not any(used.values()):
        return
    for name, is_used in used.items():
        if not is_used:
            yield (
                f"the loss is the same for other values of {name} of the batch",
                "Use it in train_step, or remove it from the data set, if this is not on purpose.",
                evidence.method_place("train_step"),
            )


@check("D313", "problem", "a loss that is constant")
def constant_loss(evidence: Evidence) -> Iterator[Found]:
    """Over steps with different batches and weights."""
    losses = evidence.losses
    if len(losses) > 2 and len(set(losses)) == 1 and math.isfinite(losses[0]) and not list(one_class(evidence)):
        yield (
            f"the loss is {losses[0]:g} in each of {len(losses)} passes",
            "Look for an output that is clamped, detached or rounded, and for a network whose weights are all 0.",
            evidence.method_place("train_step"),
        )


@check("D314", "problem", "a loss that is inf or nan")
def nonfinite_loss(evidence: Evidence) -> Iterator[Found]:
    """In the first steps."""
    if isinstance(evidence.error, NonFiniteError):  # which says the same
        return
    bad = next((number for number, loss in enumerate(evidence.losses, 1) if not math.isfinite(loss)), None)
    if bad is not None:
        yield (
            f"the loss of pass {bad} is {evidence.losses[bad - 1]}",
            "Look for log(0), a division by 0, inputs that are not scaled, or a learning rate that is too high.",
            evidence.method_place("train_step"),
        )
