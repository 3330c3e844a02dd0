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
"""How often a process looks whether another one has been asked to stop."""


LEAVE_S = 10.0
"""How long a rank that has saved waits for the others before it ends."""


class Request(NamedTuple):
    """Why a run is to stop: the reason in words, the number of the signal that asks for it, if one does, and whether a
    clock asks."""

    reason: str
    signal: int | None = None
    by_clock: bool = False

    @property
    def is_chosen(self) -> bool:
        """Whether code of the run asks, which may have looked at metrics."""
        return self.signal is None and not self.by_clock


class Stopped(Exception):
    """Raised on every process at the boundary where the run stops. It ends the epoch in `Run`, then the training."""


class Stopper:
    """Takes requests to stop and lets all processes agree on where.

    `request` sets flags and nothing else, so signal handlers and other threads may call it. A request with a signal
    goes before one without. While nobody asks, a step costs nothing: a process listens to the others about twice a
    second.

    Attributes:
        agreed: what all processes have stopped for; None before.
    """

    def __init__(self) -> None:
        self.agreed: Request | None = None
        self._request: Request | None = None
        self._loop: TrainLoop | None = None
        self._world = World()

    def begin(self, loop: TrainLoop, world: World) -> None:
        """Training begins; all processes call it together. A request that was made before counts."""
        self.agreed, self._loop, self._world = None, loop, world
        # each training has its own keys: a trainer before this one may have used the store
        self._names = "stop/" + world.comm.broadcast_object(uuid.uuid4().hex, "beginning a training")
        self._announced: Request | None = None
        self._published = False
        self._target: int | None = None
        self._pace = Pace(POLL_S, due_at_once=False)

    def end(self) -> Request | None:
        """Training is over; a request that came too late to be heeded, if there is one."""
        late, self._request, self._loop = self._request, None, None
        return late if self.agreed is None else None

    @property
    def has_signal(self) -> bool:
        """Whether a signal has asked for a stop that is not agreed on yet."""
        return self._request is not None and self._request.signal is not None

    def drop(self) -> Request | None:
        """Forget a signal that came before training began, and return it; a request of `request_stop` stays."""
        pending = self._request
        if pending is None or pending.signal is None or self._loop is not None:
            return None
        self._request = None
        return pending

    def leave_together(self) -> None:
        """After a signal, wait until all ranks have come here, so that they end close to each other; give up soon.

        A scheduler may take the first exit code that is not 0 for a failure, and end the ranks that have not left.
        """
        world, began, pause = self._world, time.monotonic(), 0.001
        if world.size == 1 or self.agreed is None or self.agreed.signal is None:
            return
        with suppress(RuntimeError):  # the store is gone, and its rank with it
            world.comm.put(f"{self._names}/leaves/{world.rank}", "")
            everybody = [f"{self._names}/leaves/{rank}" for rank in range(world.size)]
            while world.comm.get_if_all(everybody) is None and time.monotonic() - began < LEAVE_S:
                time.sleep(pause)
                pause = min(2 * pause, max(0.05, world.size / 2000))

    def request(self, reason: str, signal: int | None = None, by_clock: bool = False) -> None:
        """Ask for a stop at the next boundary that all processes agree on."""
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
        """Whether a request is known on this process, so that every boundary has to be looked at."""
        return self._request is not None

    @property
    def next_poll(self) -> int:
        """The global step at which to listen to the other processes."""
        return self._pace.next_poll if self._world.size > 1 else NEVER

    def is_due(self, step: int) -> bool:
        """Whether all processes stop after `step`, which this one has just finished.

        The process that is asked leaves word in the store. Each that knows publishes the step it has finished, once,
        and trains on; when all have, the run stops one step after the highest of them. Nobody is past that by then:
        to finish step s, a process needs the gradients of every other for s. So each other has left boundary s - 1,
        and if it has not published yet, it will at boundary s or later. A process that still misses somebody at s
        thus knows that the highest is s at least, and it has not begun the step after.

        On an accelerator the host runs ahead of the gradients; so it waits for the device before it looks.

        Raises:
            PeerError: the processes do not wait for each other in each step, and this one has gone too far.
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
                f"all processes were to stop after global step {self._target}, and rank {self._world.rank} has "
                f"finished {step}: the layers of this backend do not exchange gradients in each step."
            )
        return step == self._target

    def interrupts(self) -> bool:
        """Whether a validation is to be broken off, for a signal here or on another process."""
        if self._world.size > 1:
            if not self._is_urgent and self._pace.is_due():
                self._listen()
            self._announce()
        return self._is_urgent

    def stop_if_requested(self) -> None:
        """Between the parts of an epoch: stop if any process has been asked; all call it together.

        Raises:
            Stopped: on every process.
        """
        requests = self._world.comm.gather(self._request and tuple(self._request), "a step boundary")
        asked = [Request(*request) for request in requests if request is not None]
        if asked:
            self.agreed = next((request for request in asked if request.signal is not None), asked[0])
            raise Stopped

    @property
    def _is_urgent(self) -> bool:
        return self._request is not None and self._request.signal is not None

    def _announce(self) -> None:
        if self._request is not None and self._announced != self._request:
            self._announced = self._request
            self._world.comm.put(f"{self._names}/asked", json.dumps(self._request))

    def _listen(self) -> None:
        with self._pace.painting(), suppress(RuntimeError):  # a store that is gone shows elsewhere
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
"""Signals that ask for an end that may be followed by a resume; SIGHUP comes when a terminal or a connection closes."""

_SAME_PRESS_S = 1.0
"""A terminal and a launcher may both pass one Ctrl-C on, so what follows within this time is the same one."""

_AGAIN = b"Ctrl-C: the run stops at the end of this step. Ctrl-C again stops it at once.\n"
_ERASE_LINE = b"\r\x1b[2K"
"""Removes the line of the cursor from a terminal: the progress bar, and "^C", the terminal's echo of the keys."""


@contextmanager
def stop_on_signals(
    stopper: Stopper, *, enabled: bool, announce: bool, can_agree: Callable[[], bool]
) -> Iterator[None]:
    """SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C ask `stopper` inside; a second Ctrl-C raises KeyboardInterrupt at once.

    A signal that the program ignores, or handles in a way of its own, is left alone. Outside of the main thread, where
    Python lets nobody handle signals, nothing is done.

    `announce` tells whoever presses Ctrl-C that it was noticed. While `can_agree()` is False, the ranks have not met,
    and a signal raises `Preempted` at once. Ctrl-C raises KeyboardInterrupt at once until training has begun.
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
    """In a job of SLURM, let SIGTERM, SIGHUP and SIGUSR1 end the process by `Preempted` while `owner` does not train.

    Without this the process is killed by the signal, and its exit code does not say that the job can go on. Elsewhere,
    and for signals that the program handles or ignores, nothing is done.

    Returns:
        What gives the signals back. It is called by itself when `owner` is collected.
    """
    handler = _IdleHandler(weakref.ref(owner))
    taken: list[int] = []
    if enabled and "SLURM_JOB_ID" in os.environ and threading.current_thread() is threading.main_thread():
        for number in _signals(*_PREEMPTING):
            if signal.getsignal(number) == signal.SIG_DFL or isinstance(signal.getsignal(number), _IdleHandler):
                signal.signal(number, handler)
                taken.append(number)

    def give_back() -> None:
        while taken and threading.current_thread() is threading.main_thread():
            number = taken.pop()
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)

    weakref.finalize(owner, give_back)
    return give_back


def _signals(*names: str) -> list[int]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has no SIGUSR1


@contextmanager
def stop_after(stopper: Stopper, args: TrainerArguments) -> Iterator[None]:
    """`args.max_time` after its beginning, the block asks `stopper`. A step pays nothing for it: a thread waits."""
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
    """End `train()` for a signal that came before training began; Ctrl-C shows why if `shown`.

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
    """End `train()` if a signal has stopped it; a signal that came too late goes to whoever handles it now.

    `honoured` has stopped the run; `after_end` came when there was nothing left to stop. `log` is None on processes
    that must not say anything. Ctrl-C `returns` to the caller where the arguments ask for that.

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
    """From the beginning of Python's exit on, ignore SIGTERM, SIGHUP and SIGUSR1; for a process that was preempted.

    `srun --kill-on-bad-exit` sends SIGTERM to the ranks that still leave Python when the first has ended. Exit code 75
    would become 143. A handler does not help, because Python 3.11 gives handlers back while it ends; `SIG_IGN` stays.
    """
    atexit.unregister(_ignore_signals)
    atexit.register(_ignore_signals)  # the last that is registered comes first


def _ignore_signals() -> None:
    with suppress(ValueError):  # not in the main thread
        for number in _signals(*_PREEMPTING):
            signal.signal(number, signal.SIG_IGN)


class _IdleHandler:
    """Ends the process by `Preempted`: a trainer that does not train has nothing to save."""

    def __init__(self, owner: weakref.ref[Any]) -> None:
        self._owner = owner

    def __call__(self, number: int, frame: FrameType | None) -> None:
        owner = self._owner()
        if owner is None:  # collected in another thread, where no signal can be given back
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        ignore_signals_at_exit()
        text = f"stopped by {signal.Signals(number).name} outside of train(). There was nothing to save."
        owner._record_interruption(text)
        raise Preempted(text, number)


class _Handler:
    """Runs between two instructions of whatever the main thread does, so it sets flags and writes past all buffers."""

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
