"""The writer of TensorBoard's event files."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from trainstack._files import (
    create_file,
    library_error,
    local_path,
    make_directories,
    open_for_reading,
    open_for_update,
    sync_directory,
)
from trainstack.checkpointing.filesystem import remove_file, sync_file
from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.core.logs import RunLogger, flatten
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table, png
from trainstack.trainer.tracking.writers.base import RunInfo, Writer

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10,})\.\d{9}\.\d+")
"""Unlike the names of a `SummaryWriter`, which have the host in them: those files are the user's."""


def event_files(directory: Path) -> list[Path]:
    """The event files that a `TensorBoardWriter` has written into `directory`, oldest first."""
    return sorted(path for path in directory.glob("events.*") if _NAME.fullmatch(path.name) and path.is_file())


class TensorBoardWriter(Writer):
    """Writes scalars (float32, as TensorBoard keeps them), images, texts and tables to event files.

    Backend, arguments, plan and the module's hyperparameters are shown under HPARAMS next to the last values of the
    metrics, with the status of the run.

    The files are in `directory`. A fresh run into a directory outside its own folder that has event files goes to a new
    folder in there, `run-1`, `run-2` and so on, so that two runs do not become one curve.

    When a run is resumed, its files are cut off after the points of the checkpoint, and a new file continues them.
    Where one of these points is missing or damaged, all are rewritten from the history in the checkpoint, and the
    log says so. Each point is there once.

    Events are written at once, without the thread of a `SummaryWriter`. To wait for that thread at each log point took
    longer than to write the few points, and much longer on a busy machine.
    """

    directory: Path

    def __init__(self, directory: str | PathLike[str]) -> None:
        """Remember the directory; nothing is made yet. Raises MissingExtraError without tensorboard."""
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtraError("the tensorboard writer", "tensorboard", "tensorboard")
        self.directory = local_path(directory, "directory").absolute()
        self._writer: Any = None
        self._file: BinaryIO | None = None

    def open(self, run: RunInfo) -> None:
        """Start an event file. Raises ConfigurationError when it is open already, CheckpointError on a full disk."""
        if self._writer is not None:
            raise ConfigurationError(f"the tensorboard writer for {self.directory} is open; close() it.")
        try:
            from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter, masked_crc32c
        except ImportError as error:
            raise MissingExtraError("the tensorboard writer", "tensorboard", "tensorboard") from error
        self._events, self._summaries, self._checksum = event_pb2, summary_pb2, masked_crc32c
        self._decode_error = DecodeError
        with library_error(self.directory):
            self._begin(run, RecordWriter)

    def _begin(self, run: RunInfo, make_writer: Callable[[BinaryIO], Any]) -> None:
        resume_step, fresh = run.resume_step, run.resume_step is None
        elsewhere = not self.directory.is_relative_to(run.log_dir.absolute())
        directory = _run_directory(self.directory, fresh=fresh) if elsewhere else self.directory
        make_directories(directory)
        files = event_files(directory)  # TensorBoard reads files in the order of their names
        anew = not self._cut_off(files, run)
        if anew and elsewhere and files:  # these may be the points of another run
            directory, files = _run_directory(self.directory, fresh=True), []
            make_directories(directory)
        path = directory / _next_name(files)
        self._file = create_file(path)
        self._writer = make_writer(self._file)
        begin = {} if fresh or anew else {"step": (resume_step or 0) + 1}
        self._put(file_version="brain.Event:2", **begin)
        if begin:  # a TensorBoard that has read later steps drops them
            self._put(session_log=self._events.SessionLog(status=self._events.SessionLog.START), **begin)
        if fresh or anew:
            self._put(summary=self._session_start(run.config), step=0)
        if anew:
            self._rebuild(run, files)
        self._writer.flush()
        sync_directory(directory)

    def write(self, records: Sequence[Record]) -> None:
        """Add `records` and flush. Raises ConfigurationError when the writer is not open."""
        if self._writer is None:
            raise ConfigurationError(f"the tensorboard writer for {self.directory} is not open; call open().")
        for record in records:
            self._put(summary=self._summary(record), step=record.step)
        self._writer.flush()

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Add an image."""
        content = self._summaries.Summary.Image(
            height=image.shape[0], width=image.shape[1], colorspace=3, encoded_image_string=png(image)
        )
        self._put_value(step, tag=name, image=content)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Add a text, which TensorBoard shows as Markdown."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode(errors="replace")])
        self._put_value(step, tag=name, metadata=self._plugin("text", b""), tensor=tensor)

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Add a table, among the texts."""
        self.log_text(name, table.to_markdown(), step)

    def end(self, status: str, reason: str | None) -> None:
        """Write the status of the session."""
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        codes = {"finished": api_pb2.STATUS_SUCCESS, "stopped": api_pb2.STATUS_SUCCESS}
        info = plugin_data_pb2.SessionEndInfo(
            status=codes.get(status, api_pb2.STATUS_FAILURE), end_time_secs=time.time()
        )
        data = plugin_data_pb2.HParamsPluginData(session_end_info=info)
        self._put(summary=self._hparams_summary(metadata.SESSION_END_INFO_TAG, data), step=0)
        self._writer.flush()

    def sync(self) -> None:
        """Force the points to the disk."""
        if self._file is not None:
            sync_file(self._file)

    def close(self) -> None:
        """End the file."""
        writer, self._writer, self._file = self._writer, None, None
        if writer is not None:
            writer.close()

    def _put(self, **event: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **event).SerializeToString())

    def _put_value(self, step: int, **content: Any) -> None:
        if self._writer is None:
            raise ConfigurationError(f"the tensorboard writer for {self.directory} is not open; call open().")
        self._put(summary=self._summaries.Summary(value=[self._summaries.Summary.Value(**content)]), step=step)
        self._writer.flush()

    def _plugin(self, name: str, content: bytes) -> Any:
        metadata = self._summaries.SummaryMetadata
        return metadata(plugin_data=metadata.PluginData(plugin_name=name, content=content))

    def _session_start(self, config: Mapping[str, Any]) -> Any:
        """The hyperparameters of the run, where TensorBoard's tab HPARAMS looks for them."""
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in flatten(config):
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                info.hparams[name].number_value = value
            elif isinstance(value, str):
                info.hparams[name].string_value = value
        data = plugin_data_pb2.HParamsPluginData(session_start_info=info)
        return self._hparams_summary(metadata.SESSION_START_INFO_TAG, data)

    def _hparams_summary(self, tag: str, data: Any) -> Any:
        from tensorboard.plugins.hparams import metadata

        data.version = metadata.PLUGIN_DATA_VERSION
        plugin = self._plugin(metadata.PLUGIN_NAME, data.SerializeToString())
        value = self._summaries.Summary.Value(tag=tag, metadata=plugin, tensor=metadata.NULL_TENSOR)
        return self._summaries.Summary(value=[value])

    def _summary(self, record: Record) -> Any:
        value = self._summaries.Summary.Value(tag=record.name, simple_value=record.value)
        return self._summaries.Summary(value=[value])

    def _rebuild(self, run: RunInfo, old: Sequence[Path]) -> None:
        """Write all points of the run into the new file, and delete the files from before."""
        for record in run.records():
            self._put(summary=self._summary(record), step=record.step)
        self._writer.flush()
        self.sync()
        for path in old:
            remove_file(path)
        if run.resume_step is not None:
            RunLogger().warning(
                f"the event files in {self.directory} lacked points, or had damaged ones: they were rewritten from "
                "the history in the checkpoint."
            )

    def _cut_off(self, files: Sequence[Path], run: RunInfo) -> bool:
        """Remove points after those of the run's records; False if one of these is missing or has changed."""
        expected = chain(run.records(), [None])
        record, last = next(expected), -1 if run.resume_step is None else run.resume_step
        later = list(files)
        while later:
            path, end = later.pop(0), 0
            for event, size in self._events_in(path):
                media = _media_of(event)
                if media is not None:
                    if media.endswith("session_end_info") or (record is None and event.step > last):
                        break  # it is written again
                elif event.HasField("summary"):
                    if record is None:
                        break
                    if event.step != record.step or _bits(event.summary) != _bits(self._summary(record)):
                        return False
                    record = next(expected)
                end += size
            torn = end < path.stat().st_size
            if record is None:
                if torn:
                    with open_for_update(path) as file:
                        file.truncate(end)
                break
            if torn:
                return False
        for path in later:
            remove_file(path)
        return record is None

    def _events_in(self, path: Path) -> Iterator[tuple[Any, int]]:
        """The events of a file and the bytes that they take, up to the first that is damaged."""
        with open_for_reading(path) as file:
            left = os.fstat(file.fileno()).st_size
            while len(head := file.read(12)) == 12:
                (length,) = struct.unpack_from("<Q", head)
                left -= length + 16
                if left < 0 or struct.unpack_from("<I", head, 8)[0] != self._checksum(head[:8]):
                    return
                body = file.read(length + 4)
                if len(body) < length + 4 or struct.unpack("<I", body[length:])[0] != self._checksum(body[:length]):
                    return
                try:
                    event = self._events.Event.FromString(body[:length])
                except self._decode_error:
                    return
                yield event, 12 + len(body)


def _media_of(event: Any) -> str | None:
    """The tag of an image, a text or hyperparameters; None for a scalar, and for data that is not a summary."""
    values = list(event.summary.value) if event.HasField("summary") else []
    return values[0].tag if len(values) == 1 and values[0].WhichOneof("value") != "simple_value" else None


def _bits(message: Any) -> bytes:
    """A key that differs for two messages, also if a value is nan."""
    return bytes(message.SerializeToString(deterministic=True))


def _next_name(files: Sequence[Path]) -> str:
    """Behind those of all `files`, also where the clock was set back."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    newest = max((int(path.name.split(".")[3]) for path in files), default=0)
    return f"events.out.tfevents.{max(seconds, newest + 1):010d}.{rest:09d}.{os.getpid()}"


def _run_directory(directory: Path, *, fresh: bool) -> Path:
    """The folder of the run's events: `directory` for the first run in it, `run-<n>` for later ones."""
    if not event_files(directory):
        return directory
    numbers = (folder.name[4:] for folder in directory.glob("run-*") if folder.is_dir())
    newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    if fresh:
        return directory / f"run-{newest + 1}"
    return directory / f"run-{newest}" if newest else directory
