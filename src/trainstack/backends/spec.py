"""The grammar of backend strings over the table of registered layers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, TypeVar

import torch.distributed as dist

from trainstack._keywords import CUTOFF
from trainstack.backends.base import VERBS, Slot, TrainerBackend
from trainstack.backends.decorator import find_skipped
from trainstack.backends.processes.environment import detect_process_info
from trainstack.errors import BackendSpecError, ConfigurationError

Layer = TypeVar("Layer", bound=type[TrainerBackend])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One registered layer."""

    token: str
    slot: Slot
    layer: type[TrainerBackend]


_LAYERS: dict[str, LayerRecord] = {}
_BACKENDS: dict[str, Callable[..., TrainerBackend]] = {}


def register_layer(token: str, *, slot: Slot = Slot.USER) -> Callable[[Layer], Layer]:
    """Class decorator that makes a layer available under `token` in backend strings.

    Args:
        token: lower-case letters, digits and inner hyphens.
        slot: the place of the layer in a stack. Each slot but `Slot.USER` has one layer a stack.

    Raises:
        ConfigurationError: the token does not consist of lower-case letters, digits and inner hyphens, or is taken; or
            `ends` or `may_be_skipped` contains a word that is not a verb.

    Examples:
        >>> @ts.register_layer("counts")
        ... class Counts(ts.AbstractTrainerBackendDecorator):
        ...     steps = 0
        ...
        ...     def step(self, work):
        ...         self.steps += 1
        ...         return self.inner.step(work)
        >>> ts.Trainer(module, args, trainer_backend="sp-counts").train()
        >>> ts.unregister("counts")
    """
    if not all(part.isalnum() and part == part.lower() for part in token.split("-")):
        raise ConfigurationError(
            f"register_layer({token!r}): a token consists of lower-case letters and digits, e.g. 'ema' or 'amp-apex'."
        )
    if token in _LAYERS or token in _BACKENDS or token == "auto":
        raise ConfigurationError(f"register_layer({token!r}): this token is taken. Choose another one.")

    def add(layer: Layer) -> Layer:
        for name in ("ends", "may_be_skipped"):
            unknown = sorted(set(getattr(layer, name)) - set(VERBS))
            if unknown:
                raise ConfigurationError(
                    f"register_layer({token!r}): {layer.__name__}.{name} names {', '.join(map(repr, unknown))}, which "
                    f"is not a verb. The verbs are {', '.join(VERBS)}."
                )
        layer.name, layer.slot = token, slot
        _LAYERS[token] = LayerRecord(token=token, slot=slot, layer=layer)
        return layer

    return add


def register_trainer_backend(name: str, factory: Callable[..., TrainerBackend]) -> None:
    """Make a complete custom backend available under `name`, outside the grammar of layers.

    Args:
        name: the name for `TrainerArguments.backend`.
        factory: makes the backend from the arguments of `build_trainer_backend`.

    Raises:
        ConfigurationError: the name is taken.
    """
    if name in _LAYERS or name in _BACKENDS or name == "auto":
        raise ConfigurationError(f"register_trainer_backend({name!r}): this name is taken. Choose another one.")
    _BACKENDS[name] = factory


def unregister(name: str) -> None:
    """Remove a custom layer or backend from the table. Unknown names are ignored.

    Args:
        name: the token of the layer, or the name of the backend.
    """
    _LAYERS.pop(name, None)
    _BACKENDS.pop(name, None)


def known_layers() -> dict[str, LayerRecord]:
    """A copy of the table of layers, by token."""
    return dict(_LAYERS)


def registered_backend(name: str) -> Callable[..., Any] | None:
    """The factory registered under `name`, or None."""
    return _BACKENDS.get(name)


def may_join_processes(backend: str) -> bool:
    """Whether a backend has a layer that joins processes, or is registered, so that its layers are unknown."""
    return backend in _BACKENDS or any(record.layer.joins_processes for record in parse_spec(backend))


def parse_spec(spec: str) -> tuple[LayerRecord, ...]:
    """The layers that `spec` names, outermost first.

    Raises:
        BackendSpecError: `spec` is not a legal stack. The message gives the reason and the string to write instead.
    """
    if not isinstance(spec, str) or not spec:
        raise BackendSpecError(
            f"backend {spec!r}: a backend is named by a string such as 'sp-bf16'. "
            f"Write one of {', '.join(legal_specs())}."
        )
    records = _tokenize(expand_auto(spec))
    _check_no_repeats(spec, records)
    in_order = sorted(records, key=lambda record: record.slot)
    clash = _excluded(in_order)
    if clash is not None:
        one, other, reason = clash
        dropped = one if other.layer.private else other  # the advice must not remove a guarantee
        fixed = _with_process([r for r in in_order if r is not dropped])
        raise BackendSpecError(
            f"backend {spec!r}: {one.token!r} does not work with {other.token!r}: {reason} Write {fixed!r}."
        )
    skipped = find_skipped([(record.token, record.layer) for record in in_order])
    if skipped is not None:
        without = [[r for r in in_order if r.token != token] for token in (skipped.outer, skipped.inner)]
        first, second = map(_with_process, without)
        raise BackendSpecError(
            f"backend {spec!r}: {skipped.reason} Write {first!r} or {second!r}, or {skipped.remedy}."
        )
    if in_order[0].slot is not Slot.PROCESS:
        raise BackendSpecError(
            f"backend {spec!r}: a stack starts with a process layer. Write {_with_process(in_order)!r}."
        )
    if in_order != records:
        inner, outer = next((a, b) for a, b in pairwise(records) if a.slot > b.slot)
        raise BackendSpecError(
            f"backend {spec!r}: {outer.token!r} goes outside {inner.token!r}. Write {_join(in_order)!r}."
        )
    return tuple(records)


def expand_auto(spec: str, *, joins: bool = False) -> str:
    """`spec`, with `ddp` or `sp` in place of a first word `auto`.

    It is `ddp` if a launcher started this process, if a process group exists, or if the caller says so with `joins`.

    Raises:
        ConfigurationError: a launcher's variables are incomplete or contradict each other.
    """
    first, *rest = spec.split("-")
    if first != "auto":
        return spec
    joins = joins or (dist.is_available() and dist.is_initialized())
    try:
        joins = joins or detect_process_info() is not None
    except ConfigurationError as error:
        raise ConfigurationError(
            f"backend {spec!r}: {error} To train in this process alone, write backend={'-'.join(['sp', *rest])!r}."
        ) from error
    return "-".join(["ddp" if joins else "sp", *rest])


def legal_specs() -> tuple[str, ...]:
    """Every backend string that the registered layers allow, shortest stacks first."""
    table = known_layers().values()
    choices = [[r for r in table if r.slot is slot] for slot in Slot]
    stacks = product(choices[0], *([None, *choice] for choice in choices[1:]))
    complete = [[r for r in stack if r is not None] for stack in stacks]
    legal = [s for s in complete if _excluded(s) is None and find_skipped([(r.token, r.layer) for r in s]) is None]
    return tuple(_join(stack) for stack in sorted(legal, key=len))


def _tokenize(spec: str) -> list[LayerRecord]:
    """The layers of `spec`. The longest token comes first, so that `amp-apex` is one layer and not two."""
    table, words, records = known_layers(), spec.split("-"), []
    meant = "-".join(re.split(r"[\s_+,/-]+", spec.strip().lower()))
    if meant != spec and all(word in table for word in meant.split("-")):
        raise BackendSpecError(f"backend {spec!r}: layers are joined by '-'. Write {meant!r}.")
    while words:
        for count in range(len(words), 0, -1):
            token = "-".join(words[:count])
            if token in table:
                records.append(table[token])
                words = words[count:]
                break
        else:
            raise BackendSpecError(f"backend {spec!r}: no layer has the name {words[0]!r}. {_suggest(spec, words[0])}")
    return records


_OTHER_NAMES = {
    **dict.fromkeys(("fp16", "float16", "half", "mixed"), "amp"),
    **dict.fromkeys(("bfloat16", "bf16_mixed"), "bf16"),
    **dict.fromkeys(("dpp", "ddpp", "ddb", "distributed", "horovod"), "ddp"),
    **dict.fromkeys(("dpsgd", "dp_sgd", "opacus", "private"), "dp"),
    **dict.fromkeys(("fsdp2", "deepspeed", "zero", "zero1", "zero2", "zero3", "sharded", "fairscale"), "fsdp"),
}
_OTHER_STRINGS = {
    **dict.fromkeys(("16", "16-mixed", "fp16-mixed", "fp16", "16-true"), "sp-amp"),
    **dict.fromkeys(("bf16-mixed", "bf16-true"), "sp-bf16"),
    **dict.fromkeys(("32", "32-true", "fp32", "float32", "64", "64-true", "no", "none", "single"), "sp"),
    **dict.fromkeys(("ddp_spawn", "ddp_fork", "ddp_notebook", "dp2", "ddp_find_unused_parameters_true"), "ddp"),
    **dict.fromkeys(("deepspeed_stage_2", "deepspeed_stage_3"), "fsdp"),
}
"""Values of `precision` and `strategy` of Lightning, and of `mixed_precision` of Accelerate, with our strings."""
_DEVICES = ("cpu", "cuda", "gpu", "mps", "xpu", "tpu", "hpu", "npu", "rocm")
_NO_SUCH_SPLIT = ("tp", "pp", "ep", "tensor", "pipeline", "tensor_parallel", "pipeline_parallel", "megatron")


def _suggest(spec: str, word: str) -> str:
    """The sentence that says what to write in the place of `word`.

    The private layer is suggested for its other names only: one letter must not make a training private.
    """
    known, table = sorted(known_layers()), known_layers()
    whole, lower = spec.strip().lower(), word.lower()
    if whole in _OTHER_STRINGS:
        return f"Write {_OTHER_STRINGS[whole]!r}."
    device = lower.partition(":")[0]
    if device in _DEVICES:
        chosen = "cuda" + lower[len(device) :] if device == "gpu" else lower
        return f"That is a device. Write backend='sp', device={chosen!r}."
    if lower in _NO_SUCH_SPLIT:
        return "No layer splits single operations or stages between devices. Write 'fsdp', which shards the parameters."
    if (alias := _OTHER_NAMES.get(lower, lower)) in known:
        return f"Did you mean {alias!r}?"
    alike = [token for token in known if not table[token].layer.private]
    close = difflib.get_close_matches(lower, alike, 1, CUTOFF)
    close = close or [token for token in alike if sorted(token) == sorted(lower)]
    return f"Did you mean {close[0]!r}?" if close else f"The layers are {', '.join(known)}."


def _check_no_repeats(spec: str, records: list[LayerRecord]) -> None:
    for position, record in enumerate(records):
        for earlier in records[:position]:
            if earlier.token == record.token:
                once = [r for i, r in enumerate(records) if r.token != record.token or i == position]
                fixed = _with_process(sorted(once, key=lambda r: r.slot))
                raise BackendSpecError(f"backend {spec!r}: {record.token!r} occurs twice. Write {fixed!r}.")
            if earlier.slot == record.slot and record.slot is not Slot.USER:
                first, second = (
                    _with_process(sorted((r for r in records if r is not drop), key=lambda r: r.slot))
                    for drop in (record, earlier)
                )
                raise BackendSpecError(
                    f"backend {spec!r}: {earlier.token!r} and {record.token!r} fill the same slot "
                    f"({record.slot.name.lower()}). Write {first!r} or {second!r}."
                )


def _excluded(records: list[LayerRecord]) -> tuple[LayerRecord, LayerRecord, str] | None:
    for one in records:
        for other in records:
            if other.token in one.layer.excludes:
                return one, other, one.layer.excludes[other.token]
    return None


def _join(records: list[LayerRecord]) -> str:
    return "-".join(record.token for record in records)


def _with_process(records: list[LayerRecord]) -> str:
    has_process = any(record.slot is Slot.PROCESS for record in records)
    return _join(records) if has_process else f"sp-{_join(records)}"
