"""`ReplayTask`: the steps of a run to replay, their start, and the processes for them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainstack.backends.spec import may_join_processes, parse_spec, registered_backend
from trainstack.errors import ConfigurationError
from trainstack.replaying.arguments import arguments_of_leg, arguments_of_run
from trainstack.replaying.comparison import Span
from trainstack.replaying.judging import LegReplay, read_logs
from trainstack.replaying.recorded import Leg, RecordedRun, check_is_run, read_run, step_of
from trainstack.replaying.report import ReplayReport
from trainstack.replaying.scratch import Engine, decides
from trainstack.step_log import Start
from trainstack.trainer import TrainerArguments
from trainstack.verifying.trial import Surroundings
from trainstack.verifying.until import Until

DAY_S = 86_400.0  # the default timeout; most replays are much shorter
_ABSENT = "(absent)"
TOLERANCE = 1e-4  # relative; another order of float32 sums differs by less in a few steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """A run to replay, with the settings of the replay.

    Attributes:
        make_module, nproc, workers, tolerance, timeout_s: see `replay`.
        args: of the newest session.
        given: whether the caller passed them.
        recorded: the run.
        context: of `multiprocessing`.
    """

    make_module: Callable[..., Any]
    args: TrainerArguments
    given: bool
    recorded: RecordedRun
    nproc: int | None
    workers: int | None
    tolerance: float
    timeout_s: float
    context: Any

    @classmethod
    def of(
        cls,
        make_module: Callable[..., Any],
        folder: Path,
        args: TrainerArguments | None = None,
        nproc: int | None = None,
        workers: int | None = None,
        tolerance: float = TOLERANCE,
        timeout_s: float = DAY_S,
    ) -> ReplayTask:
        """Read the run.

        Raises:
            ConfigurationError: it cannot be replayed with these settings.
        """
        _check_numbers(nproc=nproc, tolerance=tolerance, timeout_s=timeout_s)
        check_is_run(folder)
        known = arguments_of_run(folder) if args is None else args
        recorded = read_run(folder, known)
        _refuse_private(recorded, known)
        return cls(
            make_module=make_module,
            args=known,
            given=args is not None,
            recorded=recorded,
            nproc=nproc,
            workers=workers,
            tolerance=tolerance,
            timeout_s=timeout_s,
            context=multiprocessing.get_context("spawn"),
        )

    def span(self, first: int | None, last: int | None) -> Span:
        """The steps to compare.

        Raises:
            ConfigurationError: they are not recorded, or cannot be replayed.
        """
        whole, legs = self.recorded.span, self.recorded.legs
        for name, step in (("from", first), ("to", last)):
            if step is not None and not (isinstance(step, int) and whole.first <= step <= whole.last):
                raise ConfigurationError(
                    f"--{name} {step}: {self.recorded.folder} has steps {whole.first} to {whole.last} recorded. Write "
                    "one of these steps."
                )
        chosen = Span(first=whole.first if first is None else first, last=whole.last if last is None else last)
        if chosen.first > chosen.last:
            raise ConfigurationError(f"--from {first} --to {last}: the first step comes after the last.")
        if first is None and legs[0].base > 0:
            steps = [step for step in self.recorded.steps_of_checkpoints if legs[0].base <= step < chosen.last]
            chosen = dataclasses.replace(chosen, first=max(chosen.first, steps[0] + 1)) if steps else chosen
        return chosen

    def replay(self, span: Span, say: Callable[[str], None]) -> ReplayReport:
        """Replay the steps of `span`, leg by leg, up to the first difference."""
        began, report = time.monotonic(), None
        for note in self.recorded.notes:
            say(f"note: {note}")
        folder = Path(tempfile.mkdtemp(prefix="trainstack-replay-"))
        try:
            for number, (leg, part) in enumerate(self.legs_in(span)):
                found = self.replay_leg(leg, part, folder / str(number), say)
                report = found if report is None else _joined(report, found)
                if not report.same:
                    break
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        assert report is not None
        return dataclasses.replace(
            report,
            seconds=time.monotonic() - began,
            damaged=(*self.recorded.contradictions, *report.damaged),
            notes=(*self.recorded.notes, *report.notes),
        )

    def legs_in(self, span: Span) -> Iterator[tuple[Leg, Span]]:
        """The legs of the run with steps of `span`, and those steps."""
        for leg in self.recorded.legs:
            part = Span(first=max(span.first, leg.span.first), last=min(span.last, leg.span.last))
            if part.first <= part.last:
                yield leg, part

    def replay_leg(
        self, leg: Leg, span: Span, place: Path, say: Callable[[str], None], mode: str | None = None
    ) -> ReplayReport:
        """Replay the steps `span` of `leg`. The replay writes its step log and its checkpoints to `place / "run"`.

        `mode` is that of its record; by default that of the run, or "steps" for another number of processes.
        """
        begin, damaged = self.recorded.intact_start(leg, span.first)
        size, engine = self._size(leg), self._engine(leg)
        exact = size == leg.start.world_size
        first = step_of(begin) + 1
        stored = (
            tuple(info for info in self.recorded.checkpoints if first <= step_of(info) <= span.last) if exact else ()
        )
        keep = frozenset(map(step_of, stored))
        until = Until(step=span.last + (span.last in keep), keep=keep)  # the checkpoint of a step comes after its stop
        where = "the start" if begin is None else begin.name
        say(f"replays steps {first} to {span.last} from {where} with {size} process{'es' * (size > 1)}")
        notes = _Notes(leg, place, say)
        error = engine.run(place, begin, until, mode or (leg.end.mode if exact else "steps"), notes.look)
        found = LegReplay(
            recorded=self.recorded,
            leg=leg,
            span=Span(first=first, last=span.last),
            begin=begin,
            stored=stored,
            logs=tuple(read_logs(place, size)),
            scratch=place / "run",
            error=error,
        )
        report = found.report(None if exact else self.tolerance)
        return dataclasses.replace(report, damaged=(*damaged, *report.damaged), notes=tuple(notes.found or ()))

    def _size(self, leg: Leg) -> int:
        return leg.start.world_size if self.nproc is None else self.nproc

    def _engine(self, leg: Leg) -> Engine:
        args = arguments_of_leg(self.args, leg, self.recorded.legs[-1], given=self.given)
        joins = may_join_processes(args.backend)
        size = self._size(leg)
        if size > 1 and not joins:
            raise ConfigurationError(
                f"nproc={size}: the run trained with backend {args.backend!r}, in one process. Remove nproc."
            )
        threads = leg.start.description.get("environment", {}).get("cpu threads", "")
        exact = size == leg.start.world_size
        return Engine(
            make_module=self.make_module,
            args=args,
            nproc=size if joins else None,
            surroundings=Surroundings(
                threads=int(threads) if exact and threads.isdigit() else None, workers=self.workers
            ),
            context=self.context,
            timeout_s=self.timeout_s,
        )


class _Notes:
    """Reports the differences between a replay and the recorded session, as soon as it has begun."""

    def __init__(self, leg: Leg, place: Path, say: Callable[[str], None]) -> None:
        self._leg, self._place, self._say = leg, place, say
        self.found: list[str] | None = None

    def look(self) -> bool:
        """Whether the replay has begun. If so, its differences are reported."""
        logs = read_logs(self._place, 1)
        if logs and logs[0].segments:
            self.found = _describe_differences(self._leg, logs[0].segments[0])
            for note in self.found:
                self._say(f"note: {note}")
        return self.found is not None


def _describe_differences(leg: Leg, replayed: Start) -> list[str]:
    """Sentences for the groups of facts in which a replay differs from the recorded session, one for each group."""
    before, now = leg.end.description, replayed.description
    sentences = []
    for group in before:
        if group == "weights" or (group == "optimizers" and replayed.resumed_step != leg.end.resumed_step):
            continue  # weights are compared elsewhere; learning rates depend on the step at which a session begins
        texts = _changes(group, before[group], now.get(group, {}))
        if texts:
            sentences.append(f"other {group} than recorded: {'; '.join(texts)}")
    return sentences


def _changes(group: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each changed fact, as text. The file of a script has another module name when it is imported, so names are
    ignored."""
    names = [name for name in dict.fromkeys((*before, *now)) if group != "arguments" or decides(name)]
    if group == "code":
        names = [name for name in before if before[name] not in now.values()]
    rows = [(name, before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in names]
    return [f"{name} was {one}, and is {other}" for name, one, other in rows if one != other]


def _joined(one: ReplayReport, other: ReplayReport) -> ReplayReport:
    """The report on two legs, of which the second follows the first."""
    return dataclasses.replace(
        other,
        first_step=one.first_step,
        began_from=one.began_from,
        details=one.details + other.details,
        checkpoints=(*one.checkpoints, *other.checkpoints),
        damaged=(*one.damaged, *other.damaged),
        notes=tuple(dict.fromkeys((*one.notes, *other.notes))),
    )


def _refuse_private(recorded: RecordedRun, args: TrainerArguments) -> None:
    settings, backend = args.differential_privacy_args, recorded.legs[-1].start.backend
    private = registered_backend(backend) is None and any(r.layer.private for r in parse_spec(backend))
    if private and (settings is None or settings.debug_seed is None):
        raise ConfigurationError(
            f"{recorded.folder} is a private run ({backend!r}): its batches and its noise come from secret random "
            "numbers that are never stored, so no step can be repeated. Only a run with debug_seed, which is NOT "
            "PRIVATE, can be replayed."
        )


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ConfigurationError(f"{name}={value!r}: write a number above 0.")
