"""One process owns a directory: another one is refused, waits or replaces it, and a replaced owner writes nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing.support import make_checkpoint, mark_of
from tests.helpers.patience import patience
from trainstack.checkpointing import DefaultCheckpointer, DefaultCheckpointerArguments, Lease, lease, lease_file
from trainstack.checkpointing.writing import commit, pack
from trainstack.errors import CheckpointError, ConfigurationError, LeaseError

SHORT_S = 0.6


@pytest.fixture
def take(tmp_path: Path) -> Iterator[Callable[..., Lease]]:
    held: list[Lease] = []

    def acquire(*directories: Path, **options: Any) -> Lease:
        held.append(Lease.acquire(directories or [tmp_path], **{"timeout_s": SHORT_S, **options}))
        return held[-1]

    yield acquire
    for one in held:
        one.release()


def leave_dead(directory: Path, **changes: Any) -> lease_file.LeaseRecord:
    """A lease that is not renewed, of another machine unless `changes` say otherwise."""
    mine = {**lease_file.this_process(), "host": "elsewhere", "machine": "another", "pid": 7}
    record = lease_file.LeaseRecord(
        **{**mine, "counter": 3, "token": "t", "run_id": None, "timeout_s": SHORT_S, **changes}
    )
    lease_file.make_directories(directory)
    assert lease_file.claim(directory, record)
    return record


def stop_renewing(one: Lease) -> None:
    """As if the process were stopped: its thread no longer renews."""
    one._ended.set()
    one._thread.join()


def test_a_second_owner_is_refused_and_the_first_is_named(tmp_path: Path, take: Callable[..., Lease]) -> None:
    first = take(timeout_s=60.0)
    first.set_run_id("abc")
    first.verify()
    before = time.monotonic()
    with pytest.raises(LeaseError) as raised:
        take(timeout_s=60.0)
    assert time.monotonic() - before < patience(SHORT_S)
    owner = f"process {os.getpid()} on {lease_file.this_process()['host']} (run abc)"
    assert re.search(rf"{tmp_path} is in use by another run: {re.escape(owner)} holds it for \d s", str(raised.value))
    first.verify()
    assert first.counter == 1


def test_a_released_lease_is_free_with_a_higher_counter(tmp_path: Path, take: Callable[..., Lease]) -> None:
    (tmp_path / "file").touch()
    for counter in (1, 2, 3):
        one = take()
        assert one.counter == counter
        one.release()
    assert [path.name for path in tmp_path.glob(".*")] == [".lease-000000003.json"]
    with pytest.raises(LeaseError, match="was released"):
        one.check()


def test_a_lease_leaves_no_file_in_an_unused_directory(tmp_path: Path, take: Callable[..., Lease]) -> None:
    take(tmp_path / "a" / "b").release()
    assert list(tmp_path.iterdir()) == []
    one = take(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "file").touch()
    one.release()
    assert (tmp_path / "a" / "b" / "file").exists()


def test_a_dead_process_of_this_host_is_replaced_at_once(tmp_path: Path, take: Callable[..., Lease]) -> None:
    here = lease_file.this_process()
    leave_dead(tmp_path, **{**here, "pid": 2**22 + 1}, timeout_s=60.0)
    before = time.monotonic()
    assert take().counter == 4
    leave_dead(tmp_path / "reused", **{**here, "started": "1"}, timeout_s=60.0)  # another process has its pid now
    assert take(tmp_path / "reused").counter == 4
    assert time.monotonic() - before < patience(1)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_zombie_process_is_dead(tmp_path: Path, take: Callable[..., Lease]) -> None:
    child = os.fork()
    if child == 0:
        Lease.acquire([tmp_path], timeout_s=60.0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie: it has a pid still
    before = time.monotonic()
    assert take().counter == 2
    assert time.monotonic() - before < patience(1)
    os.waitpid(child, 0)


def test_a_silent_remote_owner_is_replaced_after_its_timeout(tmp_path: Path, take: Callable[..., Lease]) -> None:
    leave_dead(tmp_path)
    said: list[str] = []
    before = time.monotonic()
    assert take(say=said.append, timeout_s=60.0).counter == 4
    assert SHORT_S <= time.monotonic() - before < patience(SHORT_S)
    (line,) = said
    assert "process 7 on elsewhere, which has not released it" in line
    assert f"acquires it after {SHORT_S:g} s without one" in line


def test_a_remote_owner_that_renews_is_not_replaced(tmp_path: Path, take: Callable[..., Lease]) -> None:
    record = leave_dead(tmp_path)
    later = threading.Timer(SHORT_S / 2, lambda: lease_file.overwrite(tmp_path, replace(record, beat=1, held_s=7200.0)))
    later.start()
    with pytest.raises(LeaseError, match="process 7 on elsewhere holds it for 120 minutes, and renewed its lease"):
        take()
    later.join()


def test_waiting_can_be_interrupted(tmp_path: Path, take: Callable[..., Lease]) -> None:
    leave_dead(tmp_path, timeout_s=60.0)
    with pytest.raises(LeaseError, match="was interrupted"):
        take(is_interrupted=lambda: True)


@pytest.mark.parametrize("offset", [-1e6, 1e6])
def test_wall_clocks_do_not_matter(
    tmp_path: Path, take: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, offset: float
) -> None:
    first = take()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset)
    first.check()
    with pytest.raises(LeaseError, match="in use"):
        take()
    first.verify()


def test_check_reads_no_file_while_the_renewal_is_recent(
    take: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = take(timeout_s=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(lease_file, "look", lambda *_: pytest.fail("read a file"))
        one.check()
        renewed, wall = one._renewed
        one._renewed = renewed - 50.0, wall  # the machine was asleep
        with pytest.raises(pytest.fail.Exception):
            one.check()


def test_a_process_stopped_for_too_long_loses_its_lease(tmp_path: Path, take: Callable[..., Lease]) -> None:
    zombie = take(timeout_s=0.2)
    stop_renewing(zombie)
    successor = take(timeout_s=0.2)
    assert successor.counter == 2
    with pytest.raises(LeaseError, match=r"no longer owns .* has taken it over \(lease 2 after 1\)"):
        zombie.verify()
    with pytest.raises(LeaseError, match="no longer owns"):
        zombie.check()
    zombie.release()
    successor.verify()


def test_a_stopped_owner_without_successor_takes_the_next_counter(take: Callable[..., Lease]) -> None:
    one = take(timeout_s=0.1)
    stop_renewing(one)
    time.sleep(0.1)
    one.check()
    assert one.counter == 2


def test_losing_a_lease_wakes_its_watcher(take: Callable[..., Lease], tmp_path: Path) -> None:
    one, woken = take(), threading.Event()
    one.watch(woken.set)
    leave_dead(tmp_path, counter=5)
    assert woken.wait(3)
    with pytest.raises(LeaseError, match="process 7 on elsewhere has taken it over"):
        one.check()


def test_a_directory_that_was_deleted_is_owned_again(tmp_path: Path, take: Callable[..., Lease]) -> None:
    one = take(tmp_path / "a")
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    (tmp_path / "a").rmdir()
    one.verify()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".lease-000000002.json"]
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    leave_dead(tmp_path / "a", counter=1)  # another process was quicker
    with pytest.raises(LeaseError, match="or its lease was deleted"):
        one.verify()


@pytest.mark.parametrize("damage", [b"", b"\0" * 1024, b"[]", b'{"format": "trainstack-lease"}', b"9" * 5000])
def test_a_damaged_lease_is_taken_over_after_the_timeout(
    tmp_path: Path, take: Callable[..., Lease], damage: bytes
) -> None:
    (tmp_path / ".lease-000000004.json").write_bytes(damage)
    before = time.monotonic()
    assert take(timeout_s=0.1).counter == 5
    assert time.monotonic() - before >= 0.1


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # the path of a socket is short


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to("nothing"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: path.symlink_to("/dev/zero"),
        Path.mkdir,
        os.mkfifo,
        make_socket,
    ],
)
def test_an_odd_entry_named_like_a_lease_is_damaged(
    tmp_path: Path, take: Callable[..., Lease], make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / ".lease-000000001.json")
    one = take(timeout_s=0.1)
    assert one.counter == 2
    make(tmp_path / ".lease-000000003.json")
    with pytest.raises(LeaseError, match=r"unknown process \(lease 3 is damaged\) has taken it over"):
        one.verify()


def write_signed(directory: Path, **changes: Any) -> None:
    """A lease with a correct hash and these fields, which no process may have written."""
    body = {"format": "trainstack-lease", **asdict(leave_dead(directory / "made", counter=1)), **changes}
    data = json.dumps({**body, "sha256": lease_file._hash(body)}).encode()
    (directory / ".lease-000000001.json").write_bytes(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", 1.5),
        ("pid", float("inf")),
        ("pid", -1),
        ("pid", True),
        ("held_s", 10**400),
        ("held_s", float("inf")),
        ("held_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", 86_401),
        ("released", "yes"),
        ("counter", "1"),
        ("run_id", ["a"]),
        ("host", None),
        ("host", "\x1b[2Jhost"),
    ],
)
def test_a_lease_with_a_wrong_field_type_is_damaged(
    tmp_path: Path, take: Callable[..., Lease], field: str, value: Any
) -> None:
    write_signed(tmp_path, **{**lease_file.this_process(), field: value})
    seen = lease_file.look(tmp_path)
    assert seen is not None
    assert seen.record is None
    assert take(timeout_s=0.1).counter == 2


def test_a_timeout_beyond_the_maximum_is_refused(tmp_path: Path, take: Callable[..., Lease]) -> None:
    take(tmp_path, timeout_s=lease_file.LONGEST_TIMEOUT_S).release()
    assert take(tmp_path).counter == 2
    for timeout_s in (86_401, float("inf"), float("nan"), 0):
        with pytest.raises(ConfigurationError, match="write seconds above 0, at most 86400"):
            take(tmp_path / "other", timeout_s=timeout_s)


def test_the_highest_counter_is_an_error_and_odd_names_ignored(tmp_path: Path, take: Callable[..., Lease]) -> None:
    for digits in ("1" * 19, "0" * 9 + "5", "12"):
        (tmp_path / f".lease-{digits}.json").touch()
    assert take().counter == 1

    (tmp_path / "end").mkdir()
    (tmp_path / "end" / f".lease-{'9' * 18}.json").touch()
    with pytest.raises(CheckpointError, match=rf"no number follows that of \.lease-{'9' * 18}\.json; delete it"):
        take(tmp_path / "end", timeout_s=0.1)


def test_the_owner_repairs_its_lease_file(tmp_path: Path, take: Callable[..., Lease]) -> None:
    one = take()
    (tmp_path / ".lease-000000001.json").write_bytes(b"x")
    one.verify()
    assert json.loads((tmp_path / ".lease-000000001.json").read_bytes())["pid"] == os.getpid()


def test_every_flipped_bit_of_a_lease_is_noticed(tmp_path: Path) -> None:
    data = leave_dead(tmp_path).render()
    length = len(data.rstrip())
    assert lease_file.parse(data) is not None
    for position in range(0, length, 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        found = lease_file.parse(bytes(damaged))
        assert found is None or found == lease_file.parse(data)  # a space became a tab


def test_of_many_that_try_at_once_one_succeeds(tmp_path: Path, take: Callable[..., Lease]) -> None:
    leave_dead(tmp_path)
    results: list[str] = []

    def attempt() -> None:
        try:
            results.append(f"owns {take().counter}")
        except LeaseError:
            results.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["owns 4", *["refused"] * 5]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_leases_work_without_hard_links(
    tmp_path: Path, take: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    take()
    with pytest.raises(LeaseError, match="in use"):
        take()


def test_two_directories_are_owned_together_or_not_at_all(tmp_path: Path, take: Callable[..., Lease]) -> None:
    take(tmp_path / "b")
    with pytest.raises(LeaseError, match="b is in use"):
        take(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "a").exists()
    leave_dead(tmp_path / "c", counter=8, released=True)
    assert take(tmp_path / "a", tmp_path / "c").counter == 9


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, take: Callable[..., Lease]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"/file is a file\. Write the path of a folder"):
        take(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"/link is a link to a missing folder\. Write the path of a folder"):
        take(tmp_path / "link")


# --- writes under a lease ------------------------------------------------------------------------------------


def save(directory: Path, owner: Lease | None, mark: int, step: int = 1) -> None:
    commit(pack(make_checkpoint(mark, step=step)), directory, f"checkpoint-{step:09d}", lease=owner)


def test_a_commit_carries_the_counter_and_needs_the_lease(tmp_path: Path, take: Callable[..., Lease]) -> None:
    zombie = take()
    save(tmp_path, zombie, 1)
    stop_renewing(zombie)
    successor = take()
    save(tmp_path, successor, 2)
    with pytest.raises(LeaseError, match="no longer owns"):
        save(tmp_path, zombie, 3)
    with pytest.raises(LeaseError, match="no longer owns"):
        save(tmp_path, zombie, 3, step=9)
    saver = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(tmp_path)))
    assert mark_of(saver.load(True)) == 2
    last = saver.last()
    assert last is not None
    assert last.lease >= 2  # on a slow machine it may have taken another one
    assert [path.name for path in tmp_path.iterdir() if ".lease" not in path.name] == ["checkpoint-000000001"]


def test_a_lease_lost_during_a_commit_withdraws_the_checkpoint(
    tmp_path: Path, take: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = take()
    looks: list[int] = []

    def verify() -> None:
        looks.append(1)
        Lease.verify(zombie)
        if len(looks) == 1:
            stop_renewing(zombie)
            save(tmp_path, take(), 2)

    monkeypatch.setattr(zombie, "verify", verify)
    with pytest.raises(LeaseError, match="no longer owns"):
        save(tmp_path, zombie, 1)
    assert mark_of(DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(tmp_path))).load(True)) == 2
    assert [path.name for path in tmp_path.iterdir() if ".lease" not in path.name] == ["checkpoint-000000001"]


def test_a_process_without_its_lease_deletes_nothing(tmp_path: Path, take: Callable[..., Lease]) -> None:
    arguments = DefaultCheckpointerArguments(save_dir=str(tmp_path), keep_last=1, keep_best=0)
    saver, successor = DefaultCheckpointer(arguments), DefaultCheckpointer(arguments)
    saver.lease = take()
    for step in (1, 2):
        successor.save(make_checkpoint(step, step=step), step)
    stop_renewing(saver.lease)
    take()
    with pytest.raises(LeaseError):
        saver.begin_run(resumed=True)
    with pytest.raises(LeaseError):
        saver.save(make_checkpoint(3, step=3), 3)
    assert mark_of(successor.load(True)) == 2


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no clock here counts the sleep of the machine")
def test_the_clock_of_leases_counts_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, wall = lease.now_s()
    assert abs(steady - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    assert abs(wall - time.time()) < 60

    slept = time.monotonic() + 1e6
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: slept}.__getitem__)
    assert lease.now_s()[0] == slept
