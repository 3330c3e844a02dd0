"""The methods of a trainer that save and load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trainstack.errors import ConfigurationError
from trainstack.trainer.core.state import RunState
from trainstack.trainer.mixins.base import TrainerBase
from trainstack.trainer.resume.exporting import export_model, push_export
from trainstack.trainer.resume.own_states import update_module
from trainstack.trainer.resume.rank_zero import wait_for_all_ranks
from trainstack.trainer.resume.restoring import origin_of
from trainstack.trainer.resume.run_snapshot import RunSnapshot


class SavingMixin(TrainerBase):
    """Checkpoints, exports and uploads."""

    def save_checkpoint(
        self,
        force: bool = False,
        *,
        pin: bool = False,
        path: str | os.PathLike[str] | None = None,
        once: Literal["world", "node"] = "world",
    ) -> None:
        """Save a checkpoint of trainer, backend and module, with the checkpointer or as the folder `path`.

        A call inside a step or a hook takes effect at the end of the step, or of the epoch if training has ended: a
        checkpoint holds a state from which a run can continue exactly.

        Args:
            force: whether to save even if no checkpoint is due.
            pin: whether to also force a save and to exempt the checkpoint from retention.
            path: folder outside of the checkpointer's control; `resume=path` continues from it. A call inside a step or
                a hook also saves an ordinary checkpoint.
            once: `"node"` writes `path` on the first process of each machine, for folders that machines do not share.

        Raises:
            NonFiniteError: a loss, a gradient or the weights are inf or nan; nothing was written.
            CheckpointError: the checkpoint could not be written; older ones are intact.
        """
        with self._context.fail_together():
            run, saver = self._ready(), self._saver
            saver.pending_pin |= pin
            saver.pending_paths += [] if path is None else [(path, once)]
            if self._context.busy:
                saver.pending_save = True
                run.loop.wake()
            elif path is not None:
                saver.save_requested()
            else:
                is_due = force or pin or self.checkpointer.is_due(self.state.last_epoch, False)
                if not (is_due or self._training) and self.is_main_process:
                    no = "save_checkpoint() writes nothing: no checkpoint is due"
                    self._context.log.warning(f"{no}. To save now, write save_checkpoint(force=True).")
                saver.save(force or pin)

    def load_checkpoint(
        self, path: str | os.PathLike[str], mode: Literal["full", "weights_and_optimizer", "weights"] = "full"
    ) -> None:
        """Load the state in `path`, as a new trainer with `resume=path` does; `validate()` and `train()` then use it.

        If it fails, nothing changes. For that it copies the module's state to host memory.

        Args:
            path: a checkpoint, or one of the words of `resume`: "last", "best".
            mode: parts of the state to load, see `resume_mode` of `TrainerArguments`.

        Raises:
            ConfigurationError: training or an evaluation is running; or a layer, such as `dp`, has prepared this run
                and cannot do it again.
            CheckpointError: the checkpoint cannot be read or does not fit.
        """
        if self._training or self._making_ready or self._context.busy:
            raise ConfigurationError(
                f"load_checkpoint({os.fspath(path)!r}) was called during training or an evaluation, whose state it "
                "would replace. Call it after train() or validate() has returned."
            )
        rigid = [layer.name for layer in self.trainer_backend.layers() if not layer.prepares_again]
        if self._run is not None and rigid:
            raise ConfigurationError(
                f"load_checkpoint({os.fspath(path)!r}): {', '.join(map(repr, rigid))} cannot prepare a module twice. "
                f"Make a new Trainer with TrainerArguments(resume={os.fspath(path)!r})."
            )
        before, run = (self.args, self._run, self._evaluation, self._finished), self._run or self._evaluation
        kept, state = None, self.state.get_state()
        if run is not None:  # the new run has new optimizers and schedulers
            kept = RunSnapshot(self._context, run.loop.work, on_host=True, keeps_moments=False)
        self.args = replace(self.args, resume=path, resume_mode=mode)
        self._run, self._evaluation, self._finished = None, None, False
        self.state.update_state(RunState(seed=self.args.seed).get_state())
        try:
            if self._context.extras.is_fixed:
                self._context.extras.go_to_start()
            self._ready_to_evaluate()
        except BaseException:
            self.args, self._run, self._evaluation, self._finished = before
            self.state.update_state(state)
            if kept is not None:
                kept.restore()
            raise
        self.events.weight_swap.drop()
        for one in before[1:3]:  # `_run` and `_evaluation`
            if one is not None:
                one.data.close()

    def save_model_checkpoint(self) -> None:
        """Export only the module's state; a run never resumes from an export."""
        with self._context.fail_together():
            export_model(self._context, self._saver, self.plan)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        part: str = "",
        card: Mapping[str, Any] | None = None,
        check_finite: bool = True,
        overwrite: bool = False,
        max_shard_size: int | str | None = None,
    ) -> None:
        """Write the module's state to the folder `path`, with a README; see `export_model`.

        Args:
            path: folder, or an address such as `s3://bucket/model`, where the manifest is written last.
            part: part of the module, such as `"model"`: only its weights, under its own names, with the configuration
                that its `from_pretrained` reads. Of a `PeftModel` only the adapters.
            card: fields for the README's front matter, the metadata of a model card, such as `{"license": "mit"}`.
            check_finite: whether inf or nan in weights and buffers is an error.
            overwrite: whether to replace an export of other weights at `path`, with all files in it.
            max_shard_size: largest size of a file, such as `"5GB"`; larger weights get several files, see
                `export_model`.

        Raises:
            NonFiniteError: the weights are inf or nan, and `check_finite` is True; nothing was written.
            CheckpointError: an export of other weights exists there; nothing was written.
            ConfigurationError: the module has no such part.
        """
        if check_finite:
            self._ready().check_finite("No export was written; write check_finite=False to export it nevertheless.")
        options: dict[str, Any] = {"overwrite": overwrite, "max_shard_size": max_shard_size}
        export_model(self._context, self._saver, self.plan, path, part=part, card=card, **options)

    def load_export(self, path: str | os.PathLike[str]) -> None:
        """Load the module's state from the folder `path`, written by `export`, on all processes.

        Each process reads its shard of one tensor after the other. A process that cannot read the folder gets the
        tensors from the main process. Call `keep_trained_weights` before, if you still need the trained weights.

        Args:
            path: folder of the export.

        Raises:
            CheckpointError: the folder has no export, or a damaged one.
            PrivacyError: the export is from a run without a guarantee, and this run is private.
        """
        with self._context.fail_together():
            self._prepared("load_export")
            if self.trainer_backend.is_private:
                origin = self._saver.run_on_rank_zero(lambda: origin_of(Path(path)), "reading the origin of an export")
                self.trainer_backend.on_initial_weights(origin)
            state = self._saver.load_model(path)
            with wait_for_all_ranks(self.world, "reading an export of the model", self.args.rank_zero_timeout_s):
                update_module(self.module, state)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        part: str = "",
        card: Mapping[str, Any] | None = None,
        include: Iterable[Literal["checkpoint", "logs"]] = (),
        commit_message: str = "Upload a model trained with trainstack",
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Export the module's state and upload it to the Hugging Face Hub.

        `part` and `card` are those of `export`. The other arguments and errors are those of the function `push_to_hub`.

        Args:
            include: additional folders of the commit: `"checkpoint"` for the newest checkpoint of this run, `"logs"`
                for the files of writers and the report.

        Returns:
            The URL of the commit.

        Raises:
            ConfigurationError: `include` has another value, or there is no checkpoint, or the run is private.
        """
        include = tuple(include)
        if set(include) - {"checkpoint", "logs"}:
            raise ConfigurationError(
                f"push_to_hub(include={include!r}): write 'checkpoint', 'logs' or both, in a tuple."
            )
        if include and self.trainer_backend.is_private:
            raise ConfigurationError(
                f"push_to_hub(include={include!r}): the run is private. Its guarantee covers only the export, not the "
                "content of checkpoints and logs. Remove include."
            )
        options: dict[str, Any] = {"commit_message": commit_message, "private": private, "revision": revision}
        options |= {"token": token, "endpoint": endpoint}
        with self._context.fail_together():
            self._ready().check_finite("Nothing was uploaded.")
            options |= {"part": part, "card": card, "include": include}
            return push_export(self._context, self._saver, self.plan, repo_id, **options)
