"""Each layer declares the verbs that it ends; here the declarations are compared with the calls that a run makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import REPRODUCIBLE, Classifier, arguments, numbers
from tests.helpers.specs import every_stack

CALLS = (*ts.VERBS, "on_fresh_start")
"""The verbs, and one other method that each layer must pass on."""


@every_stack
def test_a_layer_ends_exactly_the_verbs_that_it_declares(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = ts.build_trainer_backend(spec, **options_for(spec))

    assert contradictions(stack, tmp_path, monkeypatch) == []


@every_stack
def test_at_most_one_layer_ends_a_verb(spec: str) -> None:
    layers = list(ts.build_trainer_backend(spec).layers())

    for verb in ts.VERBS:
        assert sum(verb in layer.ends for layer in layers) <= 1, verb


class Super(ts.AbstractTrainerBackendDecorator):
    """Passes verbs on by `super()`."""

    def backward(self, work: Any, loss: Any, weight: float) -> None:
        super().backward(work, loss, weight / 2)

    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


class Managed(ts.AbstractTrainerBackendDecorator):
    """Passes `accumulate` on when the context is entered."""

    @contextmanager
    def accumulate(self, work: Any, last: bool) -> Iterator[None]:  # type: ignore[override]
        with self.inner.accumulate(work, last):
            yield


class Helped(ts.AbstractTrainerBackendDecorator):
    """Passes verbs on in methods that the verbs call."""

    def clip(self, work: Any) -> Any:
        return self._clip_inside(work)

    def _clip_inside(self, work: Any) -> Any:
        return self.inner.clip(work)

    def gather(self, outputs: Any) -> Any:
        inside = self.inner
        return inside.gather(outputs)


class Ends(ts.AbstractTrainerBackendDecorator):
    """Ends a verb, and declares it."""

    ends = frozenset({"clip"})

    def clip(self, work: Any) -> Any:
        return None


class EndsUndeclared(ts.AbstractTrainerBackendDecorator):
    def clip(self, work: Any) -> Any:
        return None


class EndsAContextUndeclared(ts.AbstractTrainerBackendDecorator):
    @contextmanager
    def accumulate(self, work: Any, last: bool) -> Iterator[None]:  # type: ignore[override]
        yield


class EndsTheFirstCallUndeclared(ts.AbstractTrainerBackendDecorator):
    def on_fresh_start(self, *, retry: bool) -> None:
        pass


class DeclaresAndPassesOn(ts.AbstractTrainerBackendDecorator):
    ends = frozenset({"backward"})


@pytest.mark.parametrize("layer", [Super, Managed, Helped, Ends])
def test_layers_may_pass_verbs_on_in_any_form(
    layer: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contradictions(layer(ts.build_trainer_backend("sp-bf16")), tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("layer", "verb"),
    [
        (EndsUndeclared, "clip"),
        (EndsAContextUndeclared, "accumulate"),
        (EndsTheFirstCallUndeclared, "on_fresh_start"),
        (DeclaresAndPassesOn, "backward"),
    ],
)
def test_a_wrong_declaration_is_detected(
    layer: type[Any], verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = layer(ts.build_trainer_backend("sp"))

    assert [found.split(": ")[0] for found in contradictions(stack, tmp_path, monkeypatch)] == [verb]


@pytest.mark.parametrize(
    ("spec", "layer", "ends", "verbs"),
    [
        ("sp-dp", ts.DP, set(), ["backward", "clip"]),
        ("sp-amp", ts.Amp, {"step"}, ["step"]),
        ("sp-bf16", ts.BFloat16, {"forward"}, ["forward"]),
    ],
)
def test_a_wrong_declaration_of_a_built_in_layer_is_detected(
    spec: str, layer: type[Any], ends: set[str], verbs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "ends", frozenset(ends))
    stack = ts.build_trainer_backend(spec, **options_for(spec))

    assert [found.split(": ")[0] for found in contradictions(stack, tmp_path, monkeypatch)] == verbs


def test_explain_prints_the_declarations() -> None:
    class All(Super, Managed, Helped):
        name = "all"

    class Last(Ends):
        name = "last"

    told = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in All(Last(ts.build_trainer_backend("sp"))).explain().splitlines()
        if line.split() and line.split()[0] in ts.VERBS
    }

    assert list(told) == list(ts.VERBS)
    assert told["accumulate"] == told["backward"] == told["forward"] == told["gather"] == "all > sp"
    assert told["clip"] == "all > last (ends here)"
    assert told["step"] == told["open"] == "sp"
    assert told["begin_evaluation"] == "nothing to do"


def test_a_declaration_of_an_unknown_verb_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match=r"Wrong\.ends names 'backwards', which is not a verb"):

        @ts.register_layer("wrong")
        class Wrong(ts.AbstractTrainerBackendDecorator):
            ends = frozenset({"backwards", "clip"})

    assert "sp-wrong" not in ts.legal_specs()


def overriding(verbs: Iterable[str], calls: Counter[str], **declared: frozenset[str]) -> type[Any]:
    """A layer that passes `verbs` on by `super()`, and counts them."""

    def counting(verb: str) -> Any:
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[verb] += 1
            return getattr(ts.AbstractTrainerBackendDecorator, verb)(self, *args, **kwargs)

        return counted

    methods = {verb: counting(verb) for verb in verbs}
    return type("Counts", (ts.AbstractTrainerBackendDecorator,), {**methods, **declared})


@contextmanager
def registered(layer: type[Any], slot: ts.Slot = ts.Slot.USER) -> Iterator[None]:
    """Register `layer` under the token `counts` within the block."""
    ts.register_layer("counts", slot=slot)(layer)
    try:
        yield
    finally:
        ts.unregister("counts")


@every_stack
def test_a_custom_layer_is_called_or_its_string_is_refused(spec: str, tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    with registered(overriding(ts.VERBS, calls, may_be_skipped=frozenset(ts.VERBS))):
        stack = ts.build_trainer_backend(f"{spec}-counts", **options_for(spec))
    trainer = ts.Trainer(Classifier(numbers(8), validate=True), arguments(tmp_path), trainer_backend=stack)
    trainer.train()
    trainer.validate()
    stack.skip(trainer._run.loop.work)  # type: ignore[union-attr]  # a run calls it only for a step without items
    trainer.close()

    for verb in ts.VERBS:
        with registered(overriding([verb], Counter())):
            legal = f"{spec}-counts" in ts.legal_specs()
            if legal:
                ts.parse_spec(f"{spec}-counts")
            else:
                with pytest.raises(ts.BackendSpecError, match=f"'counts' overrides {verb}, and .* ends {verb} before"):
                    ts.parse_spec(f"{spec}-counts")
        assert legal == (calls[verb] > 0), verb


def test_the_refusal_of_a_skipped_layer_has_a_correction() -> None:
    with (
        registered(overriding(["backward", "clip", "step"], Counter())),
        pytest.raises(ts.BackendSpecError) as refused,
    ):
        ts.build_trainer_backend("sp-dp-counts")

    assert str(refused.value) == (
        "backend 'sp-dp-counts': 'counts' overrides backward and clip, and 'dp' ends backward and clip before 'counts' "
        "is called. Write 'sp-counts' or 'sp-dp', or may_be_skipped = frozenset({'backward', 'clip'}) in the class of "
        "'counts' if that is intended."
    )


def test_the_rule_applies_to_custom_layers_in_other_slots() -> None:
    with registered(overriding(["clip"], Counter()), ts.Slot.PRECISION):
        assert "sp-counts" in ts.legal_specs()
        assert "sp-dp-counts" not in ts.legal_specs()


def test_the_rule_applies_to_stacks_of_objects(tmp_path: Path) -> None:
    stack = Ends(Helped(ts.build_trainer_backend("sp")))
    with pytest.raises(ts.ConfigurationError, match="'Helped' overrides clip, and 'Ends' ends clip before"):
        ts.Trainer(Classifier(), arguments(tmp_path), trainer_backend=stack)
    module = Classifier()
    given = ts.TrainerBackendArguments(model=module, optimizers=[torch.optim.SGD(module.parameters())])
    with pytest.raises(ts.ConfigurationError, match="'Helped' overrides clip"):
        stack.init(given)

    ts.Trainer(Classifier(), arguments(tmp_path), trainer_backend=Ends(Super(ts.build_trainer_backend("sp"))))


def test_a_skipped_amp_step_does_not_call_inner_layers(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    with registered(overriding(["step", "clip"], calls)):
        stack = ts.build_trainer_backend("sp-amp-counts", amp={"init_scale": 2.0**21, "growth_interval": 1000})
    trainer = ts.Trainer(Classifier(numbers(32)), arguments(tmp_path), trainer_backend=stack)
    trainer.train()

    assert 0 < trainer.state.skipped_steps < 4
    assert calls == {"clip": 4, "step": 4 - trainer.state.skipped_steps}


# --- helpers ------------------------------------------------------------------------------------------------


def options_for(spec: str) -> dict[str, Any]:
    return {"dp": {"args": REPRODUCIBLE}} if "dp" in spec.split("-") else {}


def contradictions(stack: ts.TrainerBackend, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train and validate on `stack`; calls that contradict the declarations, in sentences that begin with the verb.

    A layer passes a verb on if the layer inside it is called for that verb during the call.
    """
    calls = Calls(stack, monkeypatch)
    trainer = ts.Trainer(Classifier(numbers(8), validate=True), arguments(folder), trainer_backend=stack)
    trainer.train()
    trainer.validate()
    stack.skip(trainer._run.loop.work)  # type: ignore[union-attr]  # a run calls it only for a step without items
    trainer.close()
    found = [f"{verb}: a run never calls it" for verb in CALLS if (0, verb) not in calls.made]
    for position, layer in enumerate(calls.layers[:-1]):
        for verb in CALLS:
            ended = (position, verb) not in calls.passed_on
            if (position, verb) in calls.made and ended != (verb in layer.ends):
                does = "ends it" if ended else "passes it on"
                found.append(f"{verb}: {type(layer).__name__} {does}, and declares ends={sorted(layer.ends)}")
    return found


class Calls:
    """The calls that are made on each layer of a stack.

    Attributes:
        layers: of the stack, outermost first.
        made: the position of a layer and a verb that it was called for.
        passed_on: those whose layer called the next one for the same verb.
    """

    def __init__(self, stack: ts.TrainerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = list(stack.layers())
        self.made: set[tuple[int, str]] = set()
        self.passed_on: set[tuple[int, str]] = set()
        self._open_calls: list[tuple[int, str]] = []
        for position, layer in enumerate(self.layers):
            for verb in CALLS:
                monkeypatch.setattr(layer, verb, self._recorded(position, verb, getattr(layer, verb)))

    def _recorded(self, position: int, verb: str, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.made.add((position, verb))
            if (position - 1, verb) in self._open_calls:
                self.passed_on.add((position - 1, verb))
            with self.within(position, verb):
                result = call(*args, **kwargs)
            return Entered(result, self, position, verb) if verb == "accumulate" else result

        return recorded

    @contextmanager
    def within(self, position: int, verb: str) -> Iterator[None]:
        """A block that belongs to the call of `verb` on the layer at `position`."""
        self._open_calls.append((position, verb))
        try:
            yield
        finally:
            self._open_calls.pop()


class Entered(AbstractContextManager[Any]):
    """A context whose entry belongs to the call that made it, and whose body does not."""

    def __init__(self, context: AbstractContextManager[Any], calls: Calls, position: int, verb: str) -> None:
        self._context, self._calls, self._call = context, calls, (position, verb)

    def __enter__(self) -> Any:
        with self._calls.within(*self._call):
            return self._context.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        return self._context.__exit__(*raised)
