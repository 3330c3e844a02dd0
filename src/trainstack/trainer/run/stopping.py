"""`Stopper` stops all ranks at the same step boundary."""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from trainstack.backends import World
from trainstack.errors import PeerError, Preempted
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.intervals import NEVER, seconds_of
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.run.quiet_interrupt import quiet_interrupt
from trainstack.trainer.tracking.writers.console import Pace

if TYPE_CHECKING:
    from trainstack.trainer.run.train_loop import TrainLoop

POLL_S = 0.5
"""Seconds between two checks whether another process was asked to stop. A stop within a second is soon enough, and two
requests to the store in a second cost a step almost nothing."""


LEAVE_S = 10.0
"""Seconds that a rank waits for the others after its save, before it ends. SLURM sends SIGKILL 30 s after SIGTERM by
default (`KillWait`)."""


class Request(NamedTuple):
    """A request to stop the run.

    Attributes:
        reason: for messages.
        signal: the number of the signal that made the request; None without one.
        by_clock: whether a time limit made the request.
    """

    reason: str
    signal: int | None = None
    by_clock: bool = False

    @property
    def is_chosen(self) -> bool:
        """Whether code of the run made the request. It may depend on metrics."""
        return self.signal is None and not self.by_clock


class Stopped(Exception):
    """Raised on every process at the step boundary at which the run stops. It ends the epoch, then the training."""


class Stopper:
    """Accepts requests to stop, and makes all processes agree on the step.

    `request` only sets flags, so signal handlers and other threads may call it. A request with a signal replaces one
    without. Without a request, a step costs nothing: a process reads the requests of the others about twice a second.

    Attributes:
        agreed: the request for which all processes have stopped; None before.
    """

    def __init__(self) -> None:
        self.agreed: Request | None = None
        self._request: Request | None = None
        self._then_raise: Exception | None = None
        self._loop: TrainLoop | None = None
        self._world = World()

    def begin(self, loop: TrainLoop, world: World) -> None:
        """Begin a training. All processes call this together. An earlier request remains valid."""
        self.agreed, self._loop, self._world = None, loop, world
        # each training uses other keys, because an earlier trainer may have used the store
        self._names = "stop/" + world.comm.broadcast_object(uuid.uuid4().hex, "beginning a training")
        self._announced: Request | None = None
        self._published = False
        self._target: int | None = None
        self._pace = Pace(POLL_S, due_at_once=False)

    def end(self) -> tuple[Request | None, Exception | None]:
        """End the training. Returns a request that came too late, or None, and the error that a request asked for."""
        late, self._request, self._loop = self._request, None, None
        then_raise, self._then_raise = self._then_raise, None
        return late if self.agreed is None else None, then_raise

    @property
    def has_signal(self) -> bool:
        """Whether a signal has requested a stop on which the processes have not agreed yet."""
        return self._request is not None and self._request.signal is not None

    def drop(self) -> Request | None:
        """Remove and return the request of a signal that came before training. A request of `request_stop` remains."""
        pending = self._request
        if pending is None or pending.signal is None or self._loop is not None:
            return None
        self._request = None
        return pending

    def leave_together(self) -> None:
        """After a signal, wait up to `LEAVE_S` until all ranks are here, so that they end at almost the same time.

        A scheduler may treat the first exit code other than 0 as a failure, and kill the ranks that still run.
        """
        world, began, pause = self._world, time.monotonic(), 0.001  # other ranks often come within milliseconds
        if world.size == 1 or self.agreed is None or self.agreed.signal is None:
            return
        with suppress(RuntimeError):  # the rank with the store has ended
            world.comm.put(f"{self._names}/leaves/{world.rank}", "")
            everybody = [f"{self._names}/leaves/{rank}" for rank in range(world.size)]
            while world.comm.get_if_all(everybody) is None and time.monotonic() - began < LEAVE_S:
                time.sleep(pause)
                pause = min(2 * pause, max(0.05, world.size / 2000))  # at most 2,000 requests in a second, of all ranks

    def request(
        self, reason: str, signal: int | None = None, by_clock: bool = False, *, then_raise: Exception | None = None
    ) -> None:
        """Request a stop at the next step boundary on which all processes agree. The first `then_raise` counts."""
        self._then_raise = then_raise if self._then_raise is None else self._then_raise
        if self._request is None or (signal is not None and self._request.signal is None):
            self._request = Request(reason, signal, by_clock)
        if self._loop is not None:
            self._loop.next_due_step = 0

    @property
    def has_begun(self) -> bool:
        """Whether training has begun and not ended."""
        return self._loop is not None

    @property
    def is_requested(self) -> bool:
        """Whether this process has a request, so that it must call `is_due` after every step."""
        return self._request is not None

    @property
    def next_poll(self) -> int:
        """The global step after which to read the requests of the other processes."""
        return self._pace.next_poll if self._world.size > 1 else NEVER

    def is_due(self, step: int) -> bool:
        """Whether all processes stop after `step`, which this one has just finished.

        A process with a request writes it to the store. Each process that has read the request publishes its last
        finished step once, and continues to train. When all have published, the run stops one step after the highest
        published step. No process has passed that step by then: to finish step s, a process needs the gradients of all
        others for s. So all others have left boundary s - 1, and those that have not published will publish s or a
        later step. A process that does not find all steps at boundary s therefore knows that the highest is at least s,
        and it has not begun step s + 1.

        On an accelerator the host runs ahead of the gradients, so it synchronizes with the device before it reads.

        Raises:
            PeerError: the processes do not wait for each other in each step, and this one has passed the agreed step.
        """
        if self._world.size == 1:
            return self.is_requested
        if not self.is_requested and self._pace.poll(step):
            self._listen()
        if not self.is_requested:
            return False
        if self._target is None:
            self._announce()
            self._target = self._find_target(step)
        if self._target is not None and step > self._target:
            raise PeerError(
                f"all processes should have stopped after global step {self._target}, but rank {self._world.rank} has "
                f"finished {step}: the layers of this backend do not exchange gradients in each step."
            )
        return step == self._target

    def interrupts(self) -> bool:
        """Whether to interrupt a validation, because of a signal on this or another process."""
        if self._world.size > 1:
            if not self.has_signal and self._pace.is_due():
                self._listen()
            self._announce()
        return self.has_signal

    def stop_if_requested(self) -> None:
        """Stop between the parts of an epoch if any process has a request. All processes call this together.

        Raises:
            Stopped: on every process.
        """
        requests = self._world.comm.gather(self._request and tuple(self._request), "a step boundary")
        asked = [Request(*request) for request in requests if request is not None]
        if asked:
            self.agreed = next((request for request in asked if request.signal is not None), asked[0])
            raise Stopped

    def _announce(self) -> None:
        if self._request is not None and self._announced != self._request:
            self._announced = self._request
            self._world.comm.put(f"{self._names}/asked", json.dumps(self._request))

    def _listen(self) -> None:
        with self._pace.painting(), suppress(RuntimeError):  # the next collective reports a lost store
            found = self._world.comm.get_if_all([f"{self._names}/asked"])
            if found is not None:
                self.request(*json.loads(found[0]))
                self._announced = self._request

    def _find_target(self, step: int) -> int | None:
        world = self._world
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        if not self._published:
            self._published = True
            world.comm.put(f"{self._names}/{world.rank}", str(step))
        steps = world.comm.get_if_all([f"{self._names}/{rank}" for rank in range(world.size)])
        return None if steps is None else max(map(int, steps)) + 1


_PREEMPTING = ("SIGTERM", "SIGHUP", "SIGUSR1")
"""Signals that ask for an end after which the run may resume. SIGHUP is sent when a terminal or a connection closes."""

_SAME_PRESS_S = 1.0
"""Seconds within which a second SIGINT is the same Ctrl-C, because a terminal and a launcher may both send it."""

_AGAIN = b"Ctrl-C: the run stops at the end of this step. Ctrl-C again stops it at once.\n"
_ERASE_LINE = b"\r\x1b[2K"
"""Removes the line of the cursor from a terminal: the progress bar, and "^C", the terminal's echo of the keys."""


@contextmanager
def stop_on_signals(
    stopper: Stopper, *, enabled: bool, announce: bool, can_agree: Callable[[], bool]
) -> Iterator[None]:
    """In this block, SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C request a stop. A second Ctrl-C raises KeyboardInterrupt.

    Signals that the program ignores or handles keep their handlers. Outside of the main thread this does nothing,
    because Python allows signal handlers in the main thread only.

    With `announce`, the first Ctrl-C prints a message. While `can_agree()` is False, the ranks have not connected, and
    a signal raises `Preempted` at once. Ctrl-C raises KeyboardInterrupt at once until training has begun.
    """
    replaced: dict[int, Any] = {}
    handler = _Handler(stopper, announce, can_agree)
    if enabled and threading.current_thread() is threading.main_thread():
        for number in _signals(*_PREEMPTING, "SIGINT"):
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler) or isinstance(before, _IdleHandler):
                replaced[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in replaced.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before)


def end_when_idle(owner: Any, *, enabled: bool) -> Callable[[], None]:
    """In a SLURM job, let SIGTERM, SIGHUP and SIGUSR1 end the process by `Preempted` while `owner` does not train.

    Otherwise the signal kills the process, and its exit code does not show that the job can resume. This does nothing
    outside of SLURM, and for signals that the program handles or ignores.

    Returns:
        a function that restores the handlers. It is called automatically when `owner` is garbage-collected.
    """
    reference = weakref.ref(owner)
    taken: list[tuple[int, _IdleHandler]] = []
    if enabled and "SLURM_JOB_ID" in os.environ and threading.current_thread() is threading.main_thread():
        for number in _signals(*_PREEMPTING):
            handler = signal.getsignal(number)
            if handler == signal.SIG_DFL:
                handler = _IdleHandler()
                signal.signal(number, handler)
            if isinstance(handler, _IdleHandler):
                handler.owners.append(reference)
                taken.append((number, handler))

    def give_back() -> None:
        while taken:
            number, handler = taken.pop()
            handler.owners.remove(reference)
            is_last = not handler.owners and signal.getsignal(number) is handler
            if is_last and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL)

    weakref.finalize(owner, give_back)
    return give_back


def _signals(*names: str) -> list[int]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has no SIGUSR1


@contextmanager
def stop_after(stopper: Stopper, args: TrainerArguments) -> Iterator[None]:
    """Request a stop when the block has run for `args.max_time`. A thread waits, so a step costs nothing."""
    if args.max_time is None:
        yield
        return
    reason = f"max_time={args.max_time!r} is over"
    timer = threading.Timer(seconds_of("max_time", args.max_time), stopper.request, (reason, None, True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def raise_early(request: Request, *, shown: bool) -> NoReturn:
    """End `train()` for a signal that came before training began. For Ctrl-C, the reason is printed if `shown`.

    Raises:
        KeyboardInterrupt: for Ctrl-C.
        Preempted: for another signal.
    """
    text = f"stopped by {request.reason} before the first step. There was nothing to save."
    if request.signal == signal.SIGINT:
        raise quiet_interrupt(text, shown=shown)
    ignore_signals_at_exit()
    raise Preempted(text, request.signal or signal.SIGTERM)


def raise_for_signal(
    honoured: Request | None, after_end: Request | None, stop_message: str, log: RunLogger | None, *, returns: bool
) -> None:
    """End `train()` if a signal has stopped it. A signal that came after the end is raised again for its new handler.

    `honoured` is the request that has stopped the run, and `after_end` one that came too late. `log` is None on
    processes that must print nothing. With `returns`, Ctrl-C returns to the caller.

    Raises:
        KeyboardInterrupt: for Ctrl-C.
        Preempted: for another signal.
    """
    if honoured is not None and honoured.signal is not None:
        text = f"stopped by {honoured.reason} {stop_message}."
        if honoured.signal == signal.SIGINT and returns:
            if log is not None:
                log.warning(text)
            return
        if honoured.signal == signal.SIGINT:
            raise quiet_interrupt(text, shown=log is not None)
        if log is not None:
            log.warning(text)
        ignore_signals_at_exit()
        raise Preempted(text, honoured.signal)
    if after_end is not None and after_end.signal is not None:
        signal.raise_signal(after_end.signal)


def ignore_signals_at_exit() -> None:
    """Ignore SIGTERM, SIGHUP and SIGUSR1 while Python exits, in a process that was preempted.

    `srun --kill-on-bad-exit` sends SIGTERM to the other ranks when the first has ended. A rank that is still exiting
    would end with code 143 instead of 75. A handler does not help, because Python 3.11 restores the default handlers
    during its exit; `SIG_IGN` remains.
    """
    atexit.unregister(_ignore_signals)
    atexit.register(_ignore_signals)  # `atexit` calls the function that was registered last first


def _ignore_signals() -> None:
    with suppress(ValueError):  # raised outside of the main thread
        for number in _signals(*_PREEMPTING):
            signal.signal(number, signal.SIG_IGN)


class _IdleHandler:
    """Ends the process by `Preempted`, because a trainer that does not train has nothing to save.

    Attributes:
        owners: the trainers that use the handler, in the order of their creation.
    """

    def __init__(self) -> None:
        self.owners: list[weakref.ref[Any]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        owner = next((one for reference in reversed(self.owners) if (one := reference()) is not None), None)
        if owner is None:  # the last one was collected in another thread, which cannot restore the handler
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        ignore_signals_at_exit()
        text = f"stopped by {signal.Signals(number).name} outside of train(). There was nothing to save."
        owner._record_interruption(text)
        raise Preempted(text, number)


class _Handler:
    """Requests a stop. It runs between any two instructions of the main thread, so it only sets flags, and writes with
    `os.write`, because buffered streams are not reentrant."""

    def __init__(self, stopper: Stopper, announce: bool, can_agree: Callable[[], bool]) -> None:
        self._stopper, self._announce, self._can_agree = stopper, announce, can_agree
        self._pressed: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if not self._can_agree() or (number == signal.SIGINT and not self._stopper.has_begun):
            raise_early(Request(name, number), shown=self._announce)
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._pressed is not None and now - self._pressed > _SAME_PRESS_S:
                raise KeyboardInterrupt
            if self._pressed is None and self._announce:
                with suppress(OSError):
                    os.write(2, (_ERASE_LINE if os.isatty(2) else b"\n") + _AGAIN)
            self._pressed = now if self._pressed is None else self._pressed
        self._stopper.request(name, number)
