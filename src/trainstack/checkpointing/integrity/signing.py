"""Signatures of checkpoints and exports by an Ed25519 key.

The hashes in a manifest find damage, and somebody can compute bytes that fit them (xxh3 is not cryptographic). So a
signature is over the SHA-256 of every file of the folder, the manifest among them: with it over weights, arguments,
place in the order, privacy spent, chain heads of step logs and lineage. It is a file of the folder,
`SIGNATURE.json`, and so is copied and deleted with it.
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
"""Before the signed text: a key that also signs other things gives no signature that counts here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedFile:
    """What a signature says of one file: its size in bytes, and its SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What `SIGNATURE.json` says. Only `verify_signature` compares it with a key and with the files.

    Attributes:
        algorithm: "ed25519".
        public_key: the fingerprint of the key: the SHA-256 of its 32 bytes.
        created: UTC, ISO 8601, by the clock of the signer.
        name, kind, run_id, global_step: those in the manifest.
        root: the SHA-256 over names, sizes and hashes of all files.
        files: all files of the folder but the signature, by their path in it.
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
        """What was signed, in words."""
        return _subject(self.name, self.run_id, self.global_step)


def checkpoint_signer(key: str | os.PathLike[str]) -> Signer:
    """A function that makes the content of `SIGNATURE.json` for a folder, by the private key in the PEM file `key`.

    Raises:
        MissingExtraError: `cryptography` is not installed.
        ConfigurationError: `key` is no such file.
    """
    private = read_private_key(key)
    return lambda folder: _render(_signed(folder, manifest.read(folder / manifest.FILE_NAME), private))


def sign_checkpoint(path: str | os.PathLike[str], key: str | os.PathLike[str]) -> Signature:
    """Sign the checkpoint or export at `path` by the private key in the PEM file `key`; replaces an older signature.

    All files in the folder are signed, a README and a `config.json` among them: sign after the last edit. The files are
    compared with the manifest first, so nothing that is damaged gets a signature.

    Raises:
        MissingExtraError: `cryptography` is not installed.
        ConfigurationError: `key` is no Ed25519 key.
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: a file does not agree with the manifest.
        CheckpointError: the folder holds a link, or cannot be written.
    """
    private = read_private_key(key)
    root, content = open_checkpoint(path)
    if content.kind == "begin":
        raise CheckpointMismatchError(f"{root} marks the beginning of a run and holds no state. Name a checkpoint.")
    verify_files(root, content)
    try:
        with suppress(FileNotFoundError):  # of an earlier call that was killed: it would be signed, and then be gone
            filesystem.remove_file(root / f".tmp-{SIGNATURE_FILE}")
        made = _signed(root, content, private)
        filesystem.atomic_write(root / SIGNATURE_FILE, _render(made))
    except OSError as error:
        raise CheckpointError(
            f"{root / SIGNATURE_FILE} could not be written: {error}. Mend the folder, or sign a copy."
        ) from error
    return made


def read_signature(path: str | os.PathLike[str]) -> Signature | None:
    """What the signature in the folder `path` claims; None without one. Nothing is verified.

    Raises:
        SignatureError: the file cannot be read, or is not a signature.
    """
    file = Path(path) / SIGNATURE_FILE
    try:
        body = json.loads(read_small(file))
        if type(body) is not dict or (body.pop("format", None), body.pop("format_version", None)) != (FORMAT, 1):
            raise ValueError("it is of another format")
        if type(body.get("files")) is not dict:
            raise ValueError("it has no files")
        files = {name: build(SignedFile, record) for name, record in body["files"].items()}
        return build(Signature, body, files=files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SignatureError(f"{file} is no signature that can be read: {error}. Sign the checkpoint again.") from error


def claimed_signer(path: Path) -> str | None:
    """The fingerprint of the key in the signature of a checkpoint; None without one. Nothing is verified."""
    try:
        found = read_signature(path)
        return None if found is None else found.public_key
    except SignatureError:
        return "damaged"


def verify_signature(path: str | os.PathLike[str], public_key: str | os.PathLike[str]) -> Signature:
    """Compare the signature at `path` with the public key in the PEM file `public_key`, and with all files.

    Reads all bytes. What it returns holds for the bytes of that moment.

    Raises:
        SignatureError: there is none, it is of another key or another checkpoint, or files differ; with their names.
        MissingExtraError: `cryptography` is not installed.
        ConfigurationError: `public_key` is no Ed25519 key.
        CheckpointNotFoundError: there is no checkpoint at `path`.
    """
    key, root = read_public_key(public_key), Path(path).absolute()
    from cryptography.exceptions import InvalidSignature  # the line above says it if the package is missing

    found = read_signature(root)
    if found is None:
        open_checkpoint(root)  # says so if there is no checkpoint
        raise SignatureError(f"{root} is not signed: it has no {SIGNATURE_FILE}. Sign it: trainstack checkpoints sign.")
    own = fingerprint_of(key)
    if found.public_key != own:
        raise SignatureError(
            f"{root} was signed by the key {found.public_key}, and {os.fspath(public_key)} is the key {own}. Give the "
            "public key of the signer, if you trust it."
        )
    try:
        key.verify(base64.b64decode(found.signature, validate=True), _text_of(found))
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(
            f"{root / SIGNATURE_FILE} was not made by the key {own}: the signature does not fit its content, so one of "
            "them was changed. Do not use this checkpoint."
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
    """The bytes that are signed: all fields but the signature, as JSON with sorted keys and without spaces."""
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
    """The paths of all entries below `folder` but folders and the signature, with slashes; links are not followed."""
    names = []
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        names += [Path(place, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(name for name in names if name != SIGNATURE_FILE)


def _hash_all(folder: Path, sizes: Mapping[str, int | None]) -> dict[str, SignedFile | str]:
    """Size and hash of each file, or a fault of it. One that does not have its size in `sizes` is not read."""
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
    """What differs from the signature, a sentence each; an added file counts."""
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
    """A sentence where the manifest is that of another checkpoint than the signed one."""
    try:
        content = manifest.read(root / manifest.FILE_NAME)
    except CheckpointError:
        return ""
    here = _subject(content.name, content.run_id, content.global_step)
    return "" if here == signature.subject else f" The signature is that of {signature.subject}, and {here} is here."


def _subject(name: str, run_id: str | None, step: int | None) -> str:
    return f"{name} (run {run_id or 'unknown'}, global step {'unknown' if step is None else step})"
