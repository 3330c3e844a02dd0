"""A rank without samples runs a borrowed micro-batch, which leaves no trace (P-C1, P-C2, P-S1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.helpers.processes import run_world
from tests.helpers.workers import borrowed
from trainstack.backends.processes.collectives import TrainingPass, training_pass

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("source", ["indices", "batches"])
def test_a_borrowed_pass_changes_no_state_and_has_empty_outputs(source: str) -> None:
    """13 samples: the third step has one, which rank 0 trains on. Ready-made batches have two samples each."""
    main, *others = run_world(3, borrowed.last_step, samples=13, source=source)

    assert main["drew"]
    assert main["wrote"]
    assert main["given"] == [[1], [1, 3], 1]
    assert main["logged"] == [1, 2, 3]
    for rank in others:
        assert not rank["drew"]
        assert rank["given"] == [[0], [0, 3], 0]
        assert rank["logged"] == [1, 2]
        assert rank["parts"][-1] == 0, "micro_batch.samples is empty in a borrowed pass"
        assert rank["weights"] == main["weights"]
        assert len(rank["parts"]) == len(main["parts"])
        assert rank["passes"] == main["passes"] - 1, "the buffers of rank 0 as the step began"


def test_the_context_of_an_inner_layer_ends_with_the_pass() -> None:
    events: list[object] = []

    @contextmanager
    def inner() -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            events.append(error.args)
            raise
        events.append("end")

    for raised in (False, True):
        one = TrainingPass(None, inner())
        try:
            with one:
                assert training_pass() is one
                if raised:
                    raise KeyError("lost")
        except KeyError:
            events.append("raised")
        assert training_pass() is None
    assert events == ["end", ("lost",), "raised"]
