"""Saving in a background thread from reusable host buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from trainstack._deferred import whole
from trainstack.errors import CheckpointError, TrainstackError


class HostBuffers:
    """A copy of a state in host memory, in buffers that are reused.

    New memory costs more than the copy, because the system allocates it page by page at the first write. So the buffer
    of each tensor is kept under its name, and reused if dtype and shape are the same.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous copies in host memory, under the same names. The next call overwrites them.

        Tensors on a CUDA device are copied to pinned memory, all at once, followed by a synchronization. Deferred
        tensors are read one at a time.
        """
        self._buffers = {name: self._matching_buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(whole(tensor), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def release(self) -> None:
        """Release the memory."""
        self._buffers = {}

    def _matching_buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(name)
        if (
            kept is not None
            and (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)
            and (not tensor.is_cuda or kept.is_pinned())
        ):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class BackgroundWriter:
    """Runs a job in a separate thread, at most one at a time.

    The thread ends with its job, so no thread is idle. It is not a daemon: an interpreter that exits waits for it.

    Attributes:
        wake: called from the thread when a job has ended and was not abandoned, so that the owner calls `poll`.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._failure: tuple[str, BaseException] | None = None
        self._abandoned = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, what: str, job: Callable[[threading.Event], None]) -> None:
        """Start `job` after the previous one has ended.

        Args:
            what: the name of the job in messages.
            job: takes an event. If the event is set, the job has to clean up and end.

        Raises:
            CheckpointError: the previous job failed.
        """
        self.wait()
        self._abandoned = abandoned = threading.Event()

        def run() -> None:
            try:
                job(abandoned)
            except BaseException as error:
                if not abandoned.is_set():
                    self._failure = what, error
            if not abandoned.is_set():
                self.wake()

        self._thread = threading.Thread(target=run, name=f"trainstack: {what}")
        self._thread.start()

    def poll(self) -> None:
        """Raise the error of a failed job, once. Never waits.

        Raises:
            CheckpointError: the job failed. An error that is not a TrainstackError is its cause.
        """
        failure, self._failure = self._failure, None
        if failure is None:
            return
        what, error = failure
        if isinstance(error, TrainstackError):
            raise error
        raise CheckpointError(f"{what} failed in the background: {type(error).__name__}: {error}") from error

    def wait(self) -> None:
        """Wait for the running job and raise as `poll` does. A KeyboardInterrupt ends the wait, not the job."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None
        self.poll()

    def abandon(self) -> None:
        """Make the running job clean up and end. Nothing is raised for it."""
        self._abandoned.set()
