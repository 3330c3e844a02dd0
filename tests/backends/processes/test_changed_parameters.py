"""Parameters that are added, frozen or unfrozen within a step of `ddp`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.processes import run_world
from tests.helpers.workers.changed_parameters import changed

pytestmark = pytest.mark.processes


def test_parameters_created_in_train_step_must_agree_between_ranks(tmp_path: Path) -> None:
    for rank in run_world(2, changed, directory=str(tmp_path), how="created in the step, differing", backend="ddp"):
        assert "ConfigurationError: train_step has created the parameters ['extra'], which have other" in rank["error"]
        assert "Create them in a hook, such as on_end_train_step" in rank["error"]

    alone = changed(str(tmp_path), "created in the step, alike")
    for limit in (512, 2):
        for rank in run_world(
            2,
            changed,
            directory=str(tmp_path),
            how="created in the step, alike",
            backend="ddp",
            gpu_batch_size_limit=limit,
        ):
            assert rank["error"] is None
            torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("last", [False, True])
def test_a_parameter_that_train_step_freezes_is_refused(last: bool, tmp_path: Path) -> None:
    """The step that freezes it is refused, so that the last step of a run cannot have gradients of one rank."""
    steps = {"max_steps": 2} if last else {}
    for rank in run_world(2, changed, directory=str(tmp_path), how="frozen in the step", backend="ddp", **steps):
        assert "ConfigurationError: train_step has set requires_grad=False for ['net.0.weight']" in rank["error"]
        assert "Freeze them in a hook, before the forward pass, such as on_end_train_step." in rank["error"]
        assert "find_unused_parameters" not in rank["error"]


@pytest.mark.parametrize("how", ["frozen in a hook", "unfrozen in a hook", "added in a hook"])
def test_a_change_between_micro_batches_keeps_ranks_equal_without_warning(how: str, tmp_path: Path) -> None:
    for rank in run_world(2, changed, directory=str(tmp_path), how=how, backend="ddp", gpu_batch_size_limit=2):
        assert rank["error"] is None  # the ranks end with equal weights, among others
        assert not [line for line in rank["warnings"] if "itself in global step" in line]
