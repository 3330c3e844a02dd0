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
        """Hand the states of trainer, backend and module to the checkpointer, or write them as the folder `path`.

        Args:
            force: save even if no checkpoint is due.
            pin: also force a save, and exempt it from retention.
            path: of a folder that the checkpointer has nothing to do with; `resume=path` goes on from it. Asked for in
                the middle of something, an ordinary checkpoint is saved beside it.
            once: `"node"` writes `path` on the first process of each machine, for folders that they do not share.

        Called in the middle of something, from a hook or a step, it is done at the end of the step, or of the epoch
        when training has ended: a checkpoint holds a state from which a run can go on exactly.

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
                saver.save(force or pin)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        mode: Literal["full", "weights_and_optimizer", "weights"] = "full",
    ) -> None:
        """Take what `path` holds, as a new trainer with `resume=path` does; `validate()` and `train()` go on from it.

        Args:
            path: of a checkpoint, or one of the words that `resume` takes: "last", "best".
            mode: what is taken, see `resume_mode` of `TrainerArguments`.

        Raises:
            ConfigurationError: a training or an evaluation is under way; or a layer, such as `dp`, has prepared this
                run and cannot do it again.
            CheckpointError: the checkpoint cannot be read.
        """
        if self._training or self._making_ready or self._context.busy:
            raise ConfigurationError(
                f"load_checkpoint({os.fspath(path)!r}) was called in a training or an evaluation, whose state it would "
                "replace. Call it when train() or validate() has returned."
            )
        rigid = [layer.name for layer in self.trainer_backend.layers() if not layer.prepares_again]
        if self._run is not None and rigid:
            raise ConfigurationError(
                f"load_checkpoint({os.fspath(path)!r}): {', '.join(map(repr, rigid))} cannot prepare a module twice. "
                f"Make a new Trainer with TrainerArguments(resume={os.fspath(path)!r})."
            )
        before = self.args, self._run, self._evaluation, self._finished
        self.args = replace(self.args, resume=path, resume_mode=mode)
        self._run, self._evaluation, self._finished = None, None, False
        state = self.state.get_state()
        self.state.update_state(RunState(seed=self.args.seed).get_state())
        try:
            self._ready_to_evaluate()
        except BaseException:
            self.args, self._run, self._evaluation, self._finished = before
            self.state.update_state(state)
            raise
        for run in before[1:3]:
            if run is not None:
                run.data.close()

    def save_model_checkpoint(self) -> None:
        """Export the module's state alone; an export is never taken for a point to resume from."""
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
        """Write the module's state as the folder `path`, with a README; see `export_model`.

        Args:
            path: of the folder, or an address such as `s3://bucket/model`, where its manifest is written last.
            part: of the module, such as `"model"`: its weights alone, under its own names, with the configuration that
                its `from_pretrained` reads. Of a `PeftModel` the adapters alone.
            card: fields for the README's front matter, the metadata of a model card, such as `{"license": "mit"}`.
            check_finite: refuse weights and buffers that became inf or nan.
            overwrite: replace an export of other weights at `path`, with all files in it.
            max_shard_size: such as `"5GB"`: write larger weights into several files; see `export_model`.

        Raises:
            NonFiniteError: the weights are inf or nan, and `check_finite` is True; nothing was written.
            CheckpointError: an export of other weights is there; nothing was written.
            ConfigurationError: the module has no such part.
        """
        if check_finite:
            self._ready().check_finite("No export was written; write check_finite=False to export it as it is.")
        options: dict[str, Any] = {"overwrite": overwrite, "max_shard_size": max_shard_size}
        export_model(self._context, self._saver, self.plan, path, part=part, card=card, **options)

    def load_export(self, path: str | os.PathLike[str]) -> None:
        """Load the module's state from the folder `path`, which `export` has written, on all processes.

        Each process reads its part of one tensor after the other. One that does not see the folder gets them from the
        main process. Call `keep_trained_weights` before it where the trained weights must not be lost.

        Raises:
            CheckpointError: the folder has no export, or a damaged one.
            PrivacyError: a run without a guarantee has trained it, and this run is private.
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
        """Export the module's state and upload that.

        `part` and `card` are those of `export`. Other arguments and errors are those of the function `push_to_hub`.

        Args:
            include: what else goes into the commit: `"checkpoint"`, the newest of this run, as the folder `checkpoint`;
                `"logs"`, the files of writers and the report, as the folder `logs`.

        Returns:
            The URL of the commit.

        Raises:
            ConfigurationError: `include` names something else, or there is no checkpoint, or the run is private.
        """
        include = tuple(include)
        if set(include) - {"checkpoint", "logs"}:
            raise ConfigurationError(
                f"push_to_hub(include={include!r}): write 'checkpoint', 'logs' or both, in a tuple."
            )
        if include and self.trainer_backend.is_private:
            raise ConfigurationError(
                f"push_to_hub(include={include!r}): the run is private. Its guarantee covers the export alone, not all "
                "that checkpoints and logs hold. Leave include out."
            )
        options: dict[str, Any] = {"commit_message": commit_message, "private": private, "revision": revision}
        options |= {"token": token, "endpoint": endpoint}
        with self._context.fail_together():
            self._ready().check_finite("Nothing was uploaded.")
            options |= {"part": part, "card": card, "include": include}
            return push_export(self._context, self._saver, self.plan, repo_id, **options)
