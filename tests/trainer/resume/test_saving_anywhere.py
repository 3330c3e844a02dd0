"""Checkpoints in a folder that the user chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train, weights
from tests.helpers.processes import run_world
from tests.helpers.workers import checkpoints


class TestSavingInAUsersFolder:
    @pytest.mark.spec("PA-22")
    def test_a_run_continues_from_a_folder_of_the_user(self, tmp_path: Path) -> None:
        whole = train(Classifier(dropout=0.2, optimizer=torch.optim.AdamW), tmp_path, epochs=1)
        module = Classifier(dropout=0.2, optimizer=torch.optim.AdamW)
        torch.manual_seed(0)
        trainer = ts.Trainer(module, arguments(tmp_path / "a"))

        @trainer.on(ts.Event.TRAIN_STEP_END, once=3)
        def save(trainer: ts.Trainer) -> None:
            trainer.save_checkpoint(path=tmp_path / "mine" / "third")

        trainer.train()
        assert ts.read_checkpoint(tmp_path / "mine" / "third").global_step == 3
        assert not (tmp_path / "a" / "checkpoints").exists()
        torch.manual_seed(1)
        resumed = train(
            Classifier(dropout=0.2, optimizer=torch.optim.AdamW), tmp_path / "b", resume=tmp_path / "mine" / "third"
        )
        assert torch.equal(weights(resumed.module), weights(module))
        assert resumed.global_steps_finished == whole.global_steps_finished == 6
        trainer.save_checkpoint(path=tmp_path / "mine" / "last")
        assert ts.read_checkpoint(tmp_path / "mine" / "last").global_step == 6

    def test_a_save_that_is_not_due_says_so(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        saving = ts.DefaultCheckpointerArguments(every_n_epochs=2)
        trainer = ts.Trainer(Classifier(), arguments(tmp_path, checkpointer_args=saving))

        trainer.save_checkpoint()
        assert "nothing: no checkpoint is due. To save now, write save_checkpoint(force" in caplog.text
        assert not (tmp_path / "checkpoints").exists()

        caplog.clear()
        trainer.save_checkpoint(force=True)
        assert "nothing" not in caplog.text
        assert len(ts.list_checkpoints(tmp_path / "checkpoints")) == 1

    @pytest.mark.distributed
    def test_one_copy_is_written_for_the_world_or_each_node(self, tmp_path: Path) -> None:
        ranks = run_world(2, checkpoints.saves_on_nodes, directory=str(tmp_path))
        assert ranks == [{"world": True, "node": True, "same": True}, {"world": False, "node": True, "same": True}]
