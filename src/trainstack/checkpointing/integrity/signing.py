"""Signatures of checkpoints and exports by an Ed25519 key.

The hashes in a manifest detect damage, but an attacker can compute bytes with the same hash (xxh3 is not
cryptographic). So a signature covers the SHA-256 of every file of the folder, including the manifest. With it, it
covers weights, arguments, position in the order, privacy spent, chain heads of step logs and lineage. It is a file of
the folder, `SIGNATURE.json`, and so is copied and deleted with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainstack._files import open_regular, read_small
from trainstack.checkpointing import filesystem, manifest
from trainstack.checkpointing.checksums import CHUNK_BYTES, READERS
from trainstack.checkpointing.field_types import build
from trainstack.checkpointing.integrity.keys import fingerprint_of, read_private_key, read_public_key
from trainstack.checkpointing.manifest import SIGNATURE_FILE, Manifest
from trainstack.checkpointing.verification import open_checkpoint, verify_files
from trainstack.errors import CheckpointError, CheckpointMismatchError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from trainstack.checkpointing.writing import Signer

FORMAT = "trainstack-signature"
_PREFIX = b"trainstack-signature 1\n"
"""The beginning of the signed text. A signature that the same key made for another purpose is therefore not valid here.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedFile:
    """The entry of one file in a signature: its size in bytes, and its SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The content of `SIGNATURE.json`. Only `verify_signature` compares it with a key and with the files.

    Attributes:
        algorithm: "ed25519".
        public_key: the fingerprint of the key: the SHA-256 of its 32 bytes.
        created: UTC, ISO 8601, by the clock of the signer.
        name, kind, run_id, global_step: those in the manifest.
        root: the SHA-256 over names, sizes and hashes of all files.
        files: all files of the folder except the signature, by their path in it.
        signature: in base64.
    """

    algorithm: Literal["ed25519"]
    public_key: str
    created: str
    name: str
    kind: str
    run_id: str | None
    global_step: int | None
    root: str
    files: Mapping[str, SignedFile]
    signature: str

    @property
    def subject(self) -> str:
        """The signed checkpoint, as text."""
        return _subject(self.name, self.run_id, self.global_step)


def checkpoint_signer(key: str | os.PathLike[str]) -> Signer:
    """A function that makes the content of `SIGNATURE.json` for a folder, with the private key in the PEM file `key`.

    Raises:
        MissingExtraError: `cryptography` is not installed.
        ConfigurationError: `key` is not such a file.
    """
    private = read_private_key(key)
    return lambda folder: _render(_signed(folder, manifest.read(folder / manifest.FILE_NAME), private))


def sign_checkpoint(path: str | os.PathLike[str], key: str | os.PathLike[str]) -> Signature:
    """Sign the checkpoint or export at `path` with the private key in the PEM file `key`. An older signature is
    replaced.

    All files in the folder are signed, including a README and a `config.json`: sign after the last edit. The files are
    first compared with the manifest, so damaged files never get a signature.

    Raises:
        MissingExtraError: `cryptography` is not installed.
        ConfigurationError: `key` is not an Ed25519 key.
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: a file does not agree with the manifest.
        CheckpointError: the folder contains a link, or cannot be written.
    """
    private = read_private_key(key)
    root, content = open_checkpoint(path)
    if content.kind == "begin":
        raise CheckpointMismatchError(f"{root} marks the beginning of a run and holds no state. Name a checkpoint.")
    verify_files(root, content)
    try:
        with suppress(FileNotFoundError):  # left by a call that was killed; it must not be among the signed files
            filesystem.remove_file(root / f".tmp-{SIGNATURE_FILE}")
        made = _signed(root, content, private)
        filesystem.atomic_write(root / SIGNATURE_FILE, _render(made))
    except OSError as error:
        raise CheckpointError(
            f"{root / SIGNATURE_FILE} could not be written: {error}. Repair the folder, or sign a copy."
        ) from error
    return made


def read_signature(path: str | os.PathLike[str]) -> Signature | None:
    """The unverified content of the signature in the folder `path`; None without one.

    Raises:
        SignatureError: the file cannot be read, or is not a signature.
    """
    file = Path(path) / SIGNATURE_FILE
    try:
        body = json.loads(read_small(file))
        if type(body) is not dict or (body.pop("format", None), body.pop("format_version", None)) != (FORMAT, 1):
            raise ValueError("it has another format")
        if type(body.get("files")) is not dict:
            raise ValueError("it has no files")
        files = {name: build(SignedFile, record) for name, record in body["files"].items()}
        return build(Signature, body, files=files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SignatureError(f"{file} is not a readable signature: {error}. Sign the checkpoint again.") from error


def claimed_signer(path: Path) -> str | None:
    """The unverified fingerprint of the key in the signature of a checkpoint; None without one."""
    try:
        found = read_signature(path)
        return None if found is None else found.public_key
    except SignatureError:
        return "damaged"


def verify_signature(path: str | os.PathLike[str], public_key: str | os.PathLike[str]) -> Signature:
    """Compare the signature at `path` with the public key in the PEM file `public_key`, and with all files.

    It reads all bytes. The result holds for the bytes at that moment.

    Raises:
        SignatureError: there is no signature, it belongs to another key or another checkpoint, or files differ. The
            message names them.
        MissingExtraError: `cryptography` is not installed.
        ConfigurationError: `public_key` is not an Ed25519 key.
        CheckpointNotFoundError: there is no checkpoint at `path`.
    """
    key, root = read_public_key(public_key), Path(path).absolute()
    from cryptography.exceptions import InvalidSignature  # after `read_public_key`, which raises if it is missing

    found = read_signature(root)
    if found is None:
        open_checkpoint(root)  # raises if there is no checkpoint
        raise SignatureError(f"{root} is not signed: it has no {SIGNATURE_FILE}. Sign it: trainstack checkpoints sign.")
    own = fingerprint_of(key)
    if found.public_key != own:
        raise SignatureError(
            f"{root} was signed by the key {found.public_key}, and {os.fspath(public_key)} is the key {own}. Use the "
            "public key of the signer, if you trust it."
        )
    try:
        key.verify(base64.b64decode(found.signature, validate=True), _text_of(found))
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(
            f"{root / SIGNATURE_FILE} was not made by the key {own}: the signature does not match its content, so one "
            "of them was changed. Do not use this checkpoint."
        ) from error
    problems = _problems(root, found)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise SignatureError(f"{root} is not as it was signed: {shown}.{_of_another(root, found)} Do not use it.")
    return found


def _signed(folder: Path, content: Manifest, key: Ed25519PrivateKey) -> Signature:
    files: dict[str, SignedFile] = {}
    for name, record in _hash_all(folder, dict.fromkeys(_names_in(folder))).items():
        if isinstance(record, str):
            raise CheckpointError(f"{folder / name} cannot be signed: it {record}. Put a regular file in its place.")
        files[name] = record
    unsigned = Signature(
        algorithm="ed25519",
        public_key=fingerprint_of(key.public_key()),
        created=manifest.now(),
        name=content.name,
        kind=content.kind,
        run_id=content.run_id,
        global_step=content.global_step,
        root=_root_of(files),
        files=files,
        signature="",
    )
    fields = {name: getattr(unsigned, name) for name in Signature.__dataclass_fields__}
    return Signature(**{**fields, "signature": base64.b64encode(key.sign(_text_of(unsigned))).decode()})


def _text_of(signature: Signature) -> bytes:
    """The signed bytes: all fields except the signature, as JSON with sorted keys and without spaces."""
    body = asdict(signature)
    del body["signature"]
    return _PREFIX + json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def _render(signature: Signature) -> bytes:
    body: dict[str, Any] = {"format": FORMAT, "format_version": 1, **asdict(signature)}
    return (json.dumps(body, indent=1) + "\n").encode("ascii")


def _root_of(files: Mapping[str, SignedFile]) -> str:
    lines = (json.dumps([name, one.size, one.sha256]) for name, one in sorted(files.items()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _names_in(folder: Path) -> list[str]:
    """The paths of all entries in `folder`, with slashes, without folders and the signature. Links are not followed."""
    names = []
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        names += [Path(place, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(name for name in names if name != SIGNATURE_FILE)


def _hash_all(folder: Path, sizes: Mapping[str, int | None]) -> dict[str, SignedFile | str]:
    """Size and hash of each file, or its problem. A file whose size differs from `sizes` is not read."""
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _hash(folder / name, sizes[name]), sizes)
        return dict(zip(sizes, found, strict=True))


def _hash(path: Path, expected: int | None) -> SignedFile | str:
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        if expected is not None and status.st_size != expected:
            return f"has {status.st_size} bytes, and {expected} were signed"
        whole, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
        with open_regular(path) as handle:
            while count := handle.readinto(buffer):
                whole.update(buffer[:count])
                size += count
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return SignedFile(size=size, sha256=whole.hexdigest())


def _problems(root: Path, signature: Signature) -> list[str]:
    """The differences from the signature, one sentence each. An added file counts."""
    problems = [f"{name} was added" for name in _names_in(root) if name not in signature.files]
    for name, record in _hash_all(root, {name: one.size for name, one in signature.files.items()}).items():
        if isinstance(record, str):
            problems.append(f"{name} {record}")
        elif record != signature.files[name]:
            problems.append(f"{name} has other bytes")
    if _root_of(signature.files) != signature.root:
        problems.append(f"the root in {SIGNATURE_FILE} is not that of its files")
    return problems


def _of_another(root: Path, signature: Signature) -> str:
    """A sentence if the manifest is that of another checkpoint than the signed one; otherwise ""."""
    try:
        content = manifest.read(root / manifest.FILE_NAME)
    except CheckpointError:
        return ""
    here = _subject(content.name, content.run_id, content.global_step)
    return "" if here == signature.subject else f" The signature is that of {signature.subject}, and {here} is here."


def _subject(name: str, run_id: str | None, step: int | None) -> str:
    return f"{name} (run {run_id or 'unknown'}, global step {'unknown' if step is None else step})"
