"""One replay in a temporary folder: its arguments, and the processes that train."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstack.checkpointing import CheckpointInfo
from trainstack.errors import LaunchError
from trainstack.launching.options import pickle_call
from trainstack.trainer import TrainerArguments
from trainstack.verifying.arguments import arguments_in
from trainstack.verifying.trial import Surroundings, start_trial
from trainstack.verifying.until import Until

POLL_S = 0.05
FREE_ARGUMENTS = frozenset(
    {
        "checkpointer_args",
        "disable_tqdm",
        "handle_signals",
        "lease_timeout_s",
        "local_dir",
        "log_level",
        "max_time",
        "on_interrupt",
        "output_dir",
        "overwrite",
        "private_files",
        "progress",
        "rank_zero_timeout_s",
        "record",
        "report",
        "resume",
        "resume_mode",
        "reset_optimizers_schedulers",
        "save_on_exception",
        "strict_resume",
        "verify_replay",
        "on_replay_mismatch",
        "stop_grace_s",
        "writer_args",
        "writers",
    }
)
"""Arguments that a replay replaces, or that change no bit of a step."""


def decides(name: str) -> bool:
    """Whether the argument with this flat name, such as "writers[0]", may affect the bits of a step."""
    return re.split(r"[.\[]", name, maxsplit=1)[0] not in FREE_ARGUMENTS


def scratch_arguments(
    args: TrainerArguments, folder: Path, begin: CheckpointInfo | None, mode: str
) -> TrainerArguments:
    """The arguments of a replay of a run with `args`, which begins with the checkpoint `begin` and writes to `folder`.

    The schedule of checkpoints is that of the run, because a save reads the losses of the steps before it.
    """
    saving = {"async_save": False, "sharded": False, "keep_last": None, "keep_best": 1}
    return arguments_in(
        folder,
        args,
        saving,
        resume=False if begin is None else str(begin.path.absolute()),
        writers=() if args.checkpointer_args.checkpoint else ("jsonl",),  # without any file, no steps are recorded
        report=False,
        max_time=None,
        save_on_exception=False,
        handle_signals=False,
        verify_replay=0.0,
        record="full" if mode == "full" else "steps",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The common settings of replays.

    Attributes:
        make_module: makes the module, or a module and its callbacks; a new process imports it.
        args: of the run.
        nproc: processes that replay together; None for a single one.
        surroundings: of each process.
        context: of `multiprocessing`.
        timeout_s: seconds for each replay.
    """

    make_module: Callable[..., Any]
    args: TrainerArguments
    nproc: int | None
    surroundings: Surroundings
    context: Any
    timeout_s: float

    def run(
        self, place: Path, begin: CheckpointInfo | None, until: Until, mode: str, begun: Callable[[], bool]
    ) -> LaunchError | None:
        """Replay into the folder `place`. Returns the error of a failed process, whose steps may still be compared.

        `begun` is called repeatedly while the processes train, until it returns True.
        """
        args = scratch_arguments(self.args, place / "run", begin, mode)
        call = pickle_call(self.make_module, (args,), "replay")
        options: dict[str, Any] = {"until": until, "caller": "replay"}
        try:
            with start_trial(
                call, place / "process", self.nproc, self.context, self.timeout_s, self.surroundings, **options
            ) as trial:
                while not begun() and not trial.is_over(POLL_S):
                    pass
                trial.is_over()
        except LaunchError as error:
            return error
        return None
