"""The backend string, and the message for a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainstack as ts
from tests.helpers.modules import Classifier, arguments
from trainstack.backends.spec import known_layers

TOKENS = ["sp", "amp", "bf16", "amp-apex"]
KNOWN = ", ".join(sorted(known_layers()))
SCALED = (
    "'dp' does not work with 'amp': a gradient scaler skips steps and changes its scale depending on the data, without "
    "noise. The half precision for private training is 'bf16', as in 'sp-dp-bf16'."
)


@pytest.mark.spec("PMB-01", "PMB-02", "PMT-07")
@pytest.mark.parametrize(
    ("spec", "layers"),
    [("sp", ["SingleProcess"]), ("sp-amp", ["Amp", "SingleProcess"]), ("sp-bf16", ["BFloat16", "SingleProcess"])],
)
def test_a_stack_is_built_from_its_string_and_returns_it(spec: str, layers: list[str]) -> None:
    stack = ts.build_trainer_backend(spec)

    assert [type(layer).__name__ for layer in stack.layers()] == layers
    assert stack.spec == spec


def test_stacks_of_one_process_are_legal() -> None:
    assert set(ts.legal_specs()) >= {"sp", "sp-amp", "sp-bf16"}


@given(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4))
@pytest.mark.spec("PMB-02")
def test_every_wrong_string_is_answered_with_one_that_is_right(tokens: list[str]) -> None:
    spec = "-".join(tokens)
    for _ in range(4):
        if spec in ts.legal_specs():
            assert ts.build_trainer_backend(spec).spec == spec
            return
        with pytest.raises(ts.BackendSpecError, match=f"backend '{spec}'") as caught:
            ts.parse_spec(spec)
        spec = str(caught.value).rsplit("Write '", 1)[1].split("'")[0]
    pytest.fail(f"the advice for {'-'.join(tokens)!r} never ends in a legal string: {spec!r}")


def test_advice_does_not_remove_private_training() -> None:
    with pytest.raises(ts.BackendSpecError, match=r"as in 'ddp-dp'\. Write 'sp-dp-bf16'"):
        ts.parse_spec("fsdp-dp-bf16")


def test_each_stack_has_one_spelling() -> None:
    legal = [spec for n in (1, 2, 3) for p in permutations(TOKENS, n) if (spec := "-".join(p)) in ts.legal_specs()]

    assert len(legal) == len({frozenset(spec.split("-")) for spec in legal}) == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("amp-sp", "backend 'amp-sp': 'sp' goes outside 'amp'. Write 'sp-amp'."),
        ("sp-apm", "backend 'sp-apm': no layer has the name 'apm'. Did you mean 'amp'?"),
        ("amp", "backend 'amp': a stack starts with a process layer. Write 'sp-amp'."),
        ("sp-amp-amp", "backend 'sp-amp-amp': 'amp' occurs twice. Write 'sp-amp'."),
        ("sp-amp-dp", f"backend 'sp-amp-dp': {SCALED} Write 'sp-dp'."),
        ("dp-amp", f"backend 'dp-amp': {SCALED} Write 'sp-dp'."),
        ("ddp_bf16", "backend 'ddp_bf16': layers are joined by '-'. Write 'ddp-bf16'."),
        ("sp-quantum", f"backend 'sp-quantum': no layer has the name 'quantum'. The layers are {KNOWN}."),
    ],
)
def test_wrong_strings_get_the_documented_messages(spec: str, message: str) -> None:
    with pytest.raises(ts.BackendSpecError) as caught:
        ts.build_trainer_backend(spec)

    assert str(caught.value) == message


@pytest.fixture
def own_layer() -> Iterator[type[Any]]:
    @ts.register_layer("halve")
    class Halve(ts.AbstractTrainerBackendDecorator):
        """Halves every loss's gradient."""

        summary = "halves the gradient"

        def backward(self, work: Any, loss: Any, weight: float) -> None:
            self.inner.backward(work, loss, weight / 2)

    yield Halve
    ts.unregister("halve")


@pytest.mark.spec("PMB-16", "F118")
def test_a_custom_layer_follows_the_grammar(own_layer: type[Any]) -> None:
    stack = ts.build_trainer_backend("sp-amp-halve")

    assert stack.spec == "sp-amp-halve"
    assert "backward amp > halve > sp" in " ".join(stack.explain().split())
    assert {"sp-halve", "sp-amp-halve", "sp-bf16-halve"} <= set(ts.legal_specs())
    with pytest.raises(ts.BackendSpecError, match=r"'amp' goes outside 'halve'\. Write 'sp-amp-halve'"):
        ts.build_trainer_backend("sp-halve-amp")


@pytest.mark.spec("PMB-16")
def test_custom_layers_run_in_the_order_written(own_layer: type[Any], tmp_path: Path) -> None:
    calls: list[str] = []

    @ts.register_layer("count")
    class Count(ts.AbstractTrainerBackendDecorator):
        def backward(self, work: Any, loss: Any, weight: float) -> None:
            calls.append(f"count {weight}")
            self.inner.backward(work, loss, weight)

    try:
        for spec, weight in (("sp-halve-count", 0.5), ("sp-count-halve", 1.0), ("sp-bf16-halve-count", 0.5)):
            trainer = ts.Trainer(Classifier(), arguments(tmp_path / spec, backend=spec, max_steps=1))
            assert trainer.trainer_backend.spec == spec
            trainer.train()
            assert calls == [f"count {weight}"]
            calls.clear()
        with pytest.raises(ts.BackendSpecError, match="'count' occurs twice"):
            ts.build_trainer_backend("sp-count-halve-count")
    finally:
        ts.unregister("count")


def test_a_token_is_taken_once_and_spelt_simply(own_layer: type[Any]) -> None:
    for token in ("amp", "halve"):
        with pytest.raises(ts.ConfigurationError, match=f"register_layer\\('{token}'\\): this token is taken"):
            ts.register_layer(token)
    with pytest.raises(ts.ConfigurationError, match="lower-case letters"):
        ts.register_layer("My Layer")


@pytest.mark.parametrize("options", [1024, None, "init_scale", [("init_scale", 1024.0)]], ids=repr)
def test_options_are_given_by_name(options: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"'amp': .* is not a mapping. Write them by name: amp=\{'NAME': "):
        ts.build_trainer_backend("sp-amp", amp=options)


@pytest.mark.spec("PMT-03")
def test_a_custom_backend_can_be_registered() -> None:
    ts.register_trainer_backend("mine", lambda: ts.build_trainer_backend("sp-bf16"))
    try:
        assert ts.build_trainer_backend("mine").spec == "sp-bf16"
        with pytest.raises(ts.ConfigurationError, match="taken"):
            ts.register_trainer_backend("mine", ts.SingleProcess)
    finally:
        ts.unregister("mine")


@pytest.mark.spec("PMB-16")
def test_explain_prints_the_layers_of_each_verb() -> None:
    told = " ".join(ts.explain("sp-amp").split())

    assert "backward amp > sp clip amp > sp step amp > sp skip amp begin_evaluation nothing to do" in told
    assert "accumulate sp" in told
    assert "state in a checkpoint: amp" in told
