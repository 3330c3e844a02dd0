"""Campaign of damaged and hostile checkpoints, drawn at random by a seed.

`make hostile ARGS="--hostile 20000 --damage 6000 --seed 0"` takes about 15 minutes on an idle core.

A damaged checkpoint has one changed file: the library has to refuse it with the name of the file. A hostile one has
correct hashes and wrong content: reading it may succeed or raise an error of the library, and no other error. Neither
may import or execute code, write a file, or need much time or memory.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainstack import Checkpoint, read_model
from trainstack.checkpointing import index as indices
from trainstack.checkpointing import list_checkpoints, manifest, read_checkpoint, verify_checkpoint, write_checkpoint
from trainstack.checkpointing.checksums import digest
from trainstack.checkpointing.difference import differences
from trainstack.checkpointing.encoding import BY_NATIVE_NAME
from trainstack.checkpointing.index import FileIndex, TensorEntry
from trainstack.checkpointing.reading import read_states
from trainstack.cli.main import main as command
from trainstack.errors import CheckpointDamagedError, TrainstackError

LIMIT_S = 5.0
"""The limit of one case in CPU seconds; the slowest case takes a fraction of a second on an idle machine."""

Json = Any
Files = dict[str, bytes]


def make_checkpoint() -> Checkpoint:
    """A checkpoint with every kind of value that the format has."""
    weight = torch.arange(12.0).reshape(3, 4)
    everything = {
        "int": 2**70,
        "floats": [float("inf"), 1.5],
        "complex": 1 + 2j,
        "bytes": b"x",
        "tuple": (1, (2,)),
        "set": {1, 2},
        "deque": deque([1], 3),
        "dict": {1: "a", (1, 2): "b"},
        "counter": Counter("aab"),
        "factory": defaultdict(list, a=[1]),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "sparse": torch.eye(3).to_sparse(),
        "array": np.arange(3),
        "scalar": np.float32(1),
        "text": np.array(["a", "b"]),
        "wide": torch.ones(2, dtype=torch.complex128),
        "path": Path("a"),
        "empty": torch.zeros(0, 3),
    }
    state = OrderedDict({"net.weight": weight, "net.bias": weight[0].clone()})
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return Checkpoint(
        module_interface_state=state,
        trainer_state={"optimizers": [{"state": {"net.weight": {"exp_avg": weight + 1}}}], "all": everything},
        trainer_backend_state={"sp": {}},
        rng_state={"torch": torch.get_rng_state()},
        plan={"train_batch_size": 8, "world_size": 2},
        metadata={"metrics": {"val/loss": 0.5, "worst": float("nan")}, "epoch": 1, "backend": "sp"},
        global_step=3,
        rank_states=[{"generator": torch.arange(4)}, {"generator": torch.arange(3), "note": "x"}],
        run_id="0123",
    )


@dataclass
class Report:
    """The results of the cases."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    cases: int = 0

    def __str__(self) -> str:
        answers = ", ".join(f"{name} {count}" for name, count in self.answers.most_common())
        text = f"{self.cases} cases, slowest {self.slowest_s:.2f} s of CPU, {len(self.faults)} faults; {answers}"
        return "\n".join([text, *self.faults[:20]])


class Watch:
    """Records actions that reading data does not need: imports, executions, writes."""

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        risky = event in ("exec", "compile", "os.system", "subprocess.Popen", "os.exec", "pickle.find_class", "import")
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if risky or writes or event.startswith(("socket.", "ctypes.", "shutil.", "os.remove", "os.rename", "os.mkdir")):
            self.seen.append(f"{event} {args[:1]!r}"[:120])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.active, self.seen = True, []
        try:
            yield
        finally:
            self.active = False


_watch: list[Watch] = []


def watch() -> Watch:
    """The watch of this process. There is only one, because an audit hook cannot be removed."""
    if not _watch:
        _watch.append(Watch())
    return _watch[0]


def read_in_every_way(path: Path) -> dict[str, str]:
    """The result of each way to read the checkpoint at `path`: "ok", or the name of an error of the library."""
    ways: dict[str, Callable[[], Any]] = {
        "list": lambda: list_checkpoints(path.parent),
        "verify": lambda: verify_checkpoint(path),
        "read": lambda: _walk(read_checkpoint(path)),
        "mapped": lambda: _walk(read_checkpoint(path, mapped=True)),
        "model": lambda: _walk(read_model(path)),
        "outline": lambda: read_states(path, tensors=False),
    }
    answers = {}
    for name, use in ways.items():
        try:
            use()
            answers[name] = "ok"
        except TrainstackError as error:
            answers[name] = type(error).__name__
            if len(str(error)) > 5000:
                raise AssertionError(f"a message of {len(str(error))} characters") from error
    return answers


def _walk(state: Any) -> None:
    """Compare the state with itself, as `diff` does, to read all of its values."""
    content = vars(state) if isinstance(state, Checkpoint) else state
    if list(differences(content, content)):
        raise AssertionError("a state differs from itself")


def run_command(path: Path) -> None:
    """`ls`, `show` and `diff` print something or end with a message."""
    for words in (["ls", str(path.parent)], ["show", str(path)], ["diff", str(path), str(path), "--json"]):
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with quiet[0], quiet[1], contextlib.suppress(SystemExit):
            command(["checkpoints", *words])


def _case(report: Report, label: str, path: Path, judge: Callable[[], None]) -> None:
    report.cases += 1
    began = time.process_time()
    try:
        with watch().watching():
            judge()
    except Exception as error:
        report.faults.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
    report.faults += [f"{label}: {seen}" for seen in watch().seen]
    took = time.process_time() - began
    report.slowest_s = max(report.slowest_s, took)
    if took > LIMIT_S:
        report.faults.append(f"{label}: took {took:.1f} s")


# Damage: one file is changed.


def damage(cases: int, seed: int, folder: Path) -> Report:
    """Damage each file of a checkpoint at random, `cases` times."""
    path = write_checkpoint(make_checkpoint(), folder, "damaged")
    files = sorted(file.name for file in path.iterdir())
    whole = {file: (path / file).read_bytes() for file in files}
    report, draw = Report(), random.Random(seed)
    read_in_every_way(path)  # imports modules before the watch
    for number in range(cases):
        file = files[number % len(files)]
        kind = draw.choice(list(DAMAGES))
        DAMAGES[kind](path, file, whole, draw)
        changed = not _is_whole(path, whole)
        judge = partial(_judge_damage, report, path, file, changed)
        _case(report, f"damage {seed}/{number} {kind} {file}", path, judge)
        _restore(path, whole)
    return report


def _judge_damage(report: Report, path: Path, file: str, changed: bool) -> None:
    for use in (verify_checkpoint, read_checkpoint, partial(read_checkpoint, mapped=True)):
        try:
            use(path)
            report.answers["intact"] += 1
            if changed:
                raise AssertionError("was not refused")
        except CheckpointDamagedError as error:
            report.answers["refused"] += 1
            if not changed or file not in str(error):
                raise AssertionError(f"refused by {error}") from error


def _is_whole(path: Path, whole: Files) -> bool:
    return all(_has(path / file, data) for file, data in whole.items())


def _has(file: Path, data: bytes) -> bool:
    try:
        return file.is_file() and file.stat().st_size == len(data) and file.read_bytes() == data
    except OSError:
        return False


def _restore(path: Path, whole: Files) -> None:
    for entry in path.iterdir():
        if entry.name not in whole or not entry.is_file() or entry.is_symlink():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for file, data in whole.items():
        if not _has(path / file, data):
            (path / file).write_bytes(data)


def _flip(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    data = bytearray(whole[file])
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    (path / file).write_bytes(data)


def _cut(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    (path / file).write_bytes(whole[file][: draw.randrange(len(whole[file]))])


def _grow(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    extra = draw.choice((b"\n", b" ", b"\0", b"}", draw.randbytes(draw.randrange(1, 99))))
    (path / file).write_bytes(whole[file] + extra if draw.random() < 0.8 else extra + whole[file])


def _zero(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    data = bytearray(whole[file])
    start = draw.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
    (path / file).write_bytes(data)


def _exchange(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    (path / file).write_bytes(whole[draw.choice(sorted(whole))])


def _move(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    data = whole[file]
    one, two = sorted(draw.sample(range(len(data)), 2))
    (path / file).write_bytes(data[:one] + data[two:] + data[one:two])


def _remove(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    (path / file).unlink()


def _garbage(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    size = draw.choice((0, 1, len(whole[file]), draw.randrange(3000)))
    (path / file).write_bytes(draw.randbytes(size))


def _special(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    (path / file).unlink()
    kind = draw.randrange(6)
    if kind == 0:
        os.mkfifo(path / file)
    elif kind == 1:
        (path / file).mkdir()
    elif kind == 2:
        (path / file).symlink_to(file)
    elif kind == 3:
        (path / file).symlink_to("/dev/zero")
    elif kind == 4:
        (path / file).symlink_to("nowhere")
    else:
        with open(path / file, "wb") as handle:
            handle.truncate(draw.choice((len(whole[file]), 1 << 33, 1 << 42)))


def _extra(path: Path, file: str, whole: Files, draw: random.Random) -> None:
    name = draw.choice(("extra.pt", "README.md", "rank-00007.json", ".tmp-x", "a" * 255))
    (path / name).write_bytes(draw.randbytes(100))


DAMAGES: dict[str, Callable[[Path, str, Files, random.Random], None]] = {
    "flip": _flip,
    "cut": _cut,
    "grow": _grow,
    "zero": _zero,
    "exchange": _exchange,
    "move": _move,
    "remove": _remove,
    "garbage": _garbage,
    "special": _special,
    "extra": _extra,
}


# Hostile content: all hashes are correct.


class Forger:
    """Writes checkpoints of any content with correct hashes."""

    def __init__(self, path: Path) -> None:
        self.texts = {file.name: json.loads(file.read_text()) for file in path.glob("*.json")}
        self.manifest = self.texts.pop(manifest.FILE_NAME)
        self.texts.pop(manifest.INDEX_FILE)
        self.headers, self.data = {}, {}
        for file in path.glob("*.safetensors"):
            content = file.read_bytes()
            length = int.from_bytes(content[:8], "little")
            self.headers[file.name] = json.loads(content[8 : 8 + length])
            self.data[file.name] = content[8 + length :]

    def write(self, path: Path, draw: random.Random) -> str:
        """Write a checkpoint with one to three hostile changes; returns the changes."""
        content, texts, headers = copy.deepcopy((self.manifest, self.texts, self.headers))
        old = draw.random() < 0.3
        targets: list[tuple[str, Json]] = [("manifest", content), *texts.items(), *headers.items()]
        index: dict[str, Json] = {"index": None}
        changed = []
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            name, tree = draw.choice([*targets, ("index", index)])
            changed.append(name)
            if name != "index":
                mutate(tree, draw)
        files = {name: render(tree) for name, tree in texts.items()}
        hashes = {name: digest(data) for name, data in files.items()}
        found = {}
        for name, header in headers.items():
            text = render(header)
            text += b" " * (-len(text) % 8)
            head = len(text).to_bytes(8, "little") + text
            files[name] = head + self.data[name]
            found[name] = _index_of(head, header, self.data[name])
            hashes[name] = digest(files[name]) if old else found[name].combined
        if not old:
            body = json.loads(indices.render(found))
            if "index" in changed:
                mutate(body, draw)
            files[manifest.INDEX_FILE] = render(body)
            hashes[manifest.INDEX_FILE] = digest(files[manifest.INDEX_FILE])
            content["root"] = indices.root_of(found.values()) if "root" in content else None
        if "manifest" not in changed or draw.random() < 0.5:
            key = "xxh3_128" if old else "hash"
            content["files"] = {name: {"size": len(data), key: hashes[name]} for name, data in files.items()}
            if old:
                for name in [name for name in content["files"] if name.startswith("rank-")]:
                    del content["files"][name]
                content["format_version"] = 1
        files[manifest.FILE_NAME] = sign(content)
        for name, data in files.items():
            (path / name).write_bytes(data)
        return f"{'version 1, ' if old else ''}{'+'.join(changed)}"


def sign(content: dict[str, Json]) -> bytes:
    """The bytes of a manifest with its own hash."""
    content.pop("manifest_xxh3_128", None)
    text = render(content, indent=1) + b"\n"
    return text[:-3] + b',\n "manifest_xxh3_128": "' + digest(text).encode() + b'"\n}\n'


def _index_of(head: bytes, header: Json, data: bytes) -> FileIndex:
    """The entries of the header, with correct hashes for valid ones."""
    tensors = {}
    items = header.items() if isinstance(header, dict) else ()
    for name, entry in items:
        if name == "__metadata__" or not isinstance(entry, dict):
            continue
        shape, dtype, place = entry.get("shape"), entry.get("dtype"), entry.get("data_offsets")
        chunks = {}
        with contextlib.suppress(Exception):
            elements = math.prod(shape)
            chunks = {f"0:{elements}": digest(data[place[0] : place[1]])} if dtype in BY_NATIVE_NAME else {}
        tensors[name] = TensorEntry(dtype, shape, chunks)
    return FileIndex(digest(head), tensors)


def render(tree: Json, indent: int | None = None) -> bytes:
    """JSON, with markers replaced by texts that no encoder writes."""
    text = json.dumps(tree, indent=indent)
    for depth in (200, 900, 100_000):
        text = text.replace(f'"@list{depth}"', "[" * depth + "]" * depth)
        text = text.replace(f'"@dict{depth}"', '{"a":' * depth + "1" + "}" * depth)
    text = text.replace('"@digits"', "9" * 5000).replace('"@float"', "1e400")
    return text.encode()


_COLLIDING = [k * (2**61 - 1) for k in range(1, 3000)]
TAGS = ["int", "float", "complex", "bytes", "bytearray", "tuple", "set", "frozenset", "deque", "dict", "defaultdict"]
TAGS += ["OrderedDict", "Counter", "torch.Size", "torch.dtype", "torch.device", "tensor", "ndarray", "numpy", "path"]
TAGS += ["numpy.str", "numpy.bytes", "sparse tensor"]
WORDS = ["", "a" * 1000, "\x1b[31m", "\ud800", "../../x", "/dev/zero", "os.system", "_inductor", "__class__", "float32"]
WORDS += ["@list200", "@list900", "@list100000", "@dict200", "@dict900", "@dict100000", "@digits", "@float", "O", "V8"]
WORDS += ["cuda:99", "meta", "sparse_csr", "strided", "<f8", "|S0", "<U99999999", "(9999999,)f8", "f8,i4", "nan", "0x1"]
WORDS += ["net.weight", "trainer_state.all.empty", "F32", "U8", "checkpoint", "model", "begin", "AAAA", "====", "list"]
NUMBERS = [None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**400, 1e308]
NUMBERS += [-(2**63), 0.5, -0.0, float("inf"), float("nan"), 10**30]
FIELDS = ["hex", "value", "parts", "base64", "items", "maxlen", "factory", "name", "dtype", "shape", "layout"]
FIELDS += ["coalesced", "versions"]


def hostile_value(draw: random.Random, depth: int = 0) -> Json:
    """A random value of a wrong kind."""
    kind = draw.randrange(9)
    if kind < 2 or depth > 3:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(WORDS)
    if kind < 6:
        inner = {name: hostile_value(draw, depth + 1) for name in draw.sample(FIELDS, draw.randrange(1, 6))}
        return {"$type": draw.choice(TAGS), **inner}
    if kind == 6:
        return [hostile_value(draw, depth + 1) for _ in range(draw.randrange(5))]
    if kind == 7:
        return {draw.choice(WORDS): hostile_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    big = [{"$type": "int", "hex": hex(number)} for number in _COLLIDING] if depth == 0 else [0]
    pairs = draw.choice(
        (
            {"$type": "set", "items": big},
            {"$type": "dict", "items": [[item, 0] for item in big]},
            {"$type": "tuple", "items": [{"$type": "tensor", "name": "net.weight"}] * (1000 if depth == 0 else 1)},
            [{}] * (5000 if depth == 0 else 2),
        )
    )
    return copy.copy(pairs)


def mutate(tree: Json, draw: random.Random) -> None:
    """Change one node of a JSON tree."""
    places = list(_places(tree))
    if not places:
        tree["x"] = hostile_value(draw)
        return
    holder, key = draw.choice(places)
    how = draw.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1:
        other, place = draw.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif how == 2 and isinstance(holder, dict):
        holder[draw.choice(WORDS)] = hostile_value(draw)
    elif how == 3 and type(holder[key]) is int:
        holder[key] += draw.choice((-1, 1, 8, 2**31, 2**62))
    elif how == 4 and isinstance(holder[key], str):
        holder[key] = holder[key][::-1] + draw.choice(WORDS)
    else:
        holder[key] = hostile_value(draw)


def _places(tree: Json) -> Iterator[tuple[Any, Any]]:
    pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in pairs:
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def hostile(cases: int, seed: int, folder: Path, commands: bool = True) -> Report:
    """Read `cases` checkpoints with hostile content in every way, and every tenth also by the command line."""
    forger = Forger(write_checkpoint(make_checkpoint(), folder, "correct"))
    report, draw = Report(), random.Random(seed)
    path = folder / "hostile" / "checkpoint-000000001"
    path.mkdir(parents=True)
    path.with_name("correct").symlink_to(folder / "correct")
    repr(torch.zeros(1))  # the first repr of a tensor imports modules of torch (2.13.0)
    read_in_every_way(folder / "correct")
    if commands:
        run_command(folder / "correct")
    for number in range(cases):
        for file in path.iterdir():
            file.unlink()
        changes = forger.write(path, draw)

        def judge() -> None:
            for answer in read_in_every_way(path).values():
                report.answers[answer] += 1
            if commands and number % 10 == 0:  # noqa: B023 - it is called in this iteration
                run_command(path)

        _case(report, f"hostile {seed}/{number} {changes}", path, judge)
    return report


def main() -> int:
    """Run both campaigns and print the results; returns 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hostile", type=int, default=20_000, metavar="N", help="hostile checkpoints to read")
    parser.add_argument("--damage", type=int, default=6_000, metavar="N", help="damages of a file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    code = 0
    for name, run, cases in (("damage", damage, args.damage), ("hostile", hostile, args.hostile)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory() as folder:
            report = run(cases, args.seed, Path(folder))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{name}: {report}\nmemory grew by {grown:.0f} MiB", flush=True)
        code |= bool(report.faults)
    return code


if __name__ == "__main__":
    sys.exit(main())
