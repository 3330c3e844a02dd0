"""No entry of a directory makes it unusable: intact checkpoints are used, and each odd entry is named once."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing.support import make_checkpoint, mark_of
from tests.helpers.patience import patience
from trainstack import _files
from trainstack.checkpointing import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    directory,
    filesystem,
    list_checkpoints,
    manifest,
)
from trainstack.checkpointing.directory import read_entry
from trainstack.cli.main import main
from trainstack.errors import CheckpointDamagedError

FORMAT = json.dumps(manifest.FORMAT)


def manifest_of(content: bytes | str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / manifest.FILE_NAME).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def changed(**fields: Any) -> Callable[[Path], None]:
    """A manifest with a right hash and these fields."""

    def make(path: Path) -> None:
        path.mkdir()
        body = {
            "format": manifest.FORMAT,
            "format_version": manifest.FORMAT_VERSION,
            "kind": "checkpoint",
            "name": path.name,
            "sequence": 99,
            "global_step": 1,
            "created": "2026-01-01T00:00:00+00:00",
            "versions": {},
            "plan": None,
            "metadata": None,
            "files": {"state.json": {"size": 2, "xxh3_128": "0" * 32}},
            "run_id": None,
            "lease": 0,
        }
        (path / manifest.FILE_NAME).write_bytes(manifest._render({**body, **fields}))

    return make


def sparse(path: Path) -> None:
    path.mkdir()
    with (path / manifest.FILE_NAME).open("wb") as file:
        try:
            os.truncate(file.fileno(), 4 << 40)
        except OSError:
            pytest.skip("the file system has no files of 4 TiB")


def special(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def within(path: Path) -> None:
        path.mkdir()
        make(path / manifest.FILE_NAME)

    return within


def bind(path: Path) -> None:
    one = socket.socket(socket.AF_UNIX)
    before = os.getcwd()
    os.chdir(path.parent)  # a socket's name may have 108 bytes
    try:
        one.bind(path.name)
    finally:
        os.chdir(before)
        one.close()


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("needs the right to make devices")


def loop(path: Path) -> None:
    path.symlink_to(path.with_name("other-way"))
    path.with_name("other-way").symlink_to(path)


ODD: dict[str, Callable[[Path], None]] = {
    "list": manifest_of(f"[{FORMAT}]"),
    "foreign list": manifest_of("[]"),
    "number": manifest_of("7"),
    "infinite number": manifest_of(f'{{"format": {FORMAT}, "sequence": 1e999}}'),
    "null": manifest_of("null"),
    "text": manifest_of(FORMAT),
    "nested lists": manifest_of("[" * 100_000 + FORMAT),
    "nested objects": manifest_of('{"a":' * 100_000 + FORMAT),
    "empty file": manifest_of(b""),
    "zeros": manifest_of(b"\0" * 4096),
    "no UTF-8": manifest_of(b"\xff\xfe" + manifest.FORMAT.encode()),
    "sequence as text": changed(sequence="99"),
    "sequence as float": changed(sequence=1e300),
    "name as a list": changed(name=["a"]),
    "created as a number": changed(created=5),
    "huge metric": changed(metadata={"metrics": {"val/loss": 10**400}}),
    "files as a list": changed(files=[1]),
    "size as text": changed(files={"state.json": {"size": "2", "xxh3_128": "0"}}),
    "file outside": changed(files={"../state.json": {"size": 2, "xxh3_128": "0"}}),
    "unknown kind": changed(kind="other"),
    "FIFO as manifest": special(os.mkfifo),
    "socket as manifest": special(bind),
    "device as manifest": special(device),
    "folder as manifest": special(Path.mkdir),
    "manifest is a link to itself": special(lambda path: path.symlink_to(path)),
    "manifest is a link to a device": special(lambda path: path.symlink_to("/dev/zero")),
    "4 TiB": sparse,
    "FIFO": os.mkfifo,
    "socket": bind,
    "device": device,
    "link to itself": lambda path: path.symlink_to(path),
    "links in a circle": loop,
    "link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
}


def odd_names() -> dict[str, str]:
    return {
        "long": "checkpoint-" + "9" * 244,
        "bytes": os.fsdecode(b"checkpoint-\xff\xfe-000000009"),
        "lines": "a\nb\n",
    }


def use(root: Path, entry: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Load, list, verify, `ls` and save with `entry` there; all of them find the intact checkpoints."""
    saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(root)))
    began = time.process_time()
    assert mark_of(saver.load("auto")) == 2
    assert mark_of(saver.load("auto")) == 2
    assert [info.global_step for info in list_checkpoints(root)] == [1, 2]
    shown = directory.printable(entry).rpartition("/")[2]
    named = [record for record in caplog.records if shown in record.getMessage()]
    assert named
    assert all(record.levelno == logging.WARNING for record in named)
    assert main(["checkpoints", "ls", str(root)]) == 0
    assert "checkpoint-000000002" in capsys.readouterr().out
    assert main(["checkpoints", "verify", str(root)]) in (0, 1)
    verified = capsys.readouterr()
    assert f"{root / 'checkpoint-000000001'}: intact" in verified.out
    main(["checkpoints", "scrub", str(root)])
    assert f"{root / 'checkpoint-000000001'}: intact" in capsys.readouterr().out
    saver.save(make_checkpoint(3, step=3), 3)
    assert mark_of(saver.load("last")) == 3
    assert time.process_time() - began < patience(2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(tmp_path)))
    for mark in (1, 2):
        saver.save(make_checkpoint(mark, step=mark), mark)
    return tmp_path


@pytest.mark.skipif(os.name == "nt", reason="needs special files")
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_entry_is_named_and_skipped(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    ODD[kind](root / "checkpoint-000000009")
    use(root, root / "checkpoint-000000009", caplog, capsys)


@pytest.mark.skipif(os.name == "nt", reason="needs such names")
@pytest.mark.parametrize("name", odd_names().values(), ids=odd_names())
def test_odd_names_are_harmless(
    root: Path, name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest_of("[]")(root / name)
    use(root, root / name, caplog, capsys)


def test_an_odd_entry_is_named_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(root / "checkpoint-000000009")
    for _ in range(3):
        DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(root))).load("auto")
        list_checkpoints(root)
    assert caplog.text.count("it is neither a file nor a folder") == 1


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "setuid") or os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_folder_without_permission_is_skipped(root: Path) -> None:
    (root / "lost+found").mkdir(mode=0o700)
    (root / "checkpoint-000000009").mkdir(mode=0o700)
    for folder in (root, *root.parents):
        if folder.owner() == "root" and folder != Path("/") and folder != Path("/tmp"):
            os.chmod(folder, 0o755)
    os.chmod(root, 0o777)
    # Now: Python may be installed where another user cannot read modules or codecs that are still to be imported.
    assert mark_of(DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(root))).load("auto")) == 2
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(root)))
            assert mark_of(saver.load("auto")) == 2
            odd = directory.scan(root).odd
            assert (
                odd[root / "lost+found"] == odd[root / "checkpoint-000000009"] == "it cannot be read: Permission denied"
            )
            saver.save(make_checkpoint(3, step=3), 3)
            assert mark_of(saver.load("auto")) == 3
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ordinary_files_and_folders_are_not_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "notes.txt").write_text("x")
    (root / "plots").mkdir()
    list_checkpoints(root)
    assert not directory.scan(root).odd
    assert "skipping" not in caplog.text


def test_an_unchanged_manifest_is_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time.sleep(directory._COARSE_S + 0.05)
    first = directory.scan(root)
    monkeypatch.setattr(directory, "read_small", lambda path: pytest.fail(f"read {path}"))
    assert directory.scan(root).intact == first.intact
    os.utime(root / "checkpoint-000000001" / manifest.FILE_NAME)
    with pytest.raises(pytest.fail.Exception, match="checkpoint-000000001"):
        directory.scan(root)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_folders_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, "no")
        real(descriptor)

    monkeypatch.setattr(_files, "_said", set())
    monkeypatch.setattr(os, "fsync", refuse)
    if code == errno.EIO:
        with pytest.raises(OSError, match="no"):
            filesystem.sync_directory(tmp_path)
        return
    saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(tmp_path)))
    for mark in (1, 2):
        saver.save(make_checkpoint(mark, step=mark), mark)
    assert mark_of(saver.load("auto")) == 2
    assert caplog.text.count("cannot force the names of files to the disk") == 1


def test_a_missing_free_space_figure_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(_files, "_said", set())
    monkeypatch.setattr(filesystem.shutil, "disk_usage", refuse)
    saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(tmp_path)))
    for mark in (1, 2):
        saver.save(make_checkpoint(mark, step=mark), mark)
    assert caplog.text.count("does not report its free space") == 1


@pytest.mark.parametrize("has_tree", [False, True])
def test_a_manifest_that_cannot_be_read_is_named(has_tree: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-000000001"
    (path / "MANIFEST.json").mkdir(parents=True)
    if has_tree:
        (path / "state.json").write_bytes(b"{}")

    entry = read_entry(path)
    assert isinstance(entry, CheckpointDamagedError if has_tree else str)
    assert "cannot be read: " in str(entry)
