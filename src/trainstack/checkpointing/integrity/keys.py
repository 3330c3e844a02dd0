"""Ed25519 keys that sign checkpoints, as PEM files. The package `cryptography` is imported when a key is used."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstack._files import local_path, read_small
from trainstack.errors import CheckpointError, ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MAX_BYTES = 64 << 10


def make_key(path: str | os.PathLike[str]) -> Path:
    """Write a new private key to the file `path`, and its public key to `path` with the suffix `.pub`.

    The private key is PKCS#8 in PEM without a password, and only its owner can read the file (mode 0600). Everyone who
    has it can sign in your name: store it outside of the folders of runs.

    Returns:
        The path of the public key.

    Raises:
        MissingExtraError: `cryptography` is not installed.
        CheckpointError: one of the files exists, or cannot be written. A key is never overwritten.

    Examples:
        >>> public_key = ts.make_key("key.pem")
        >>> path = ts.export_model(module, "line")
        >>> signature = ts.sign_checkpoint(path, "key.pem")
        >>> ts.verify_signature(path, public_key) == signature
        True
    """
    private_path = local_path(path).absolute()
    public_path = private_path.with_name(f"{private_path.name}.pub")
    for file in (private_path, public_path):
        if os.path.lexists(file):
            raise CheckpointError(f"{file} exists, and a key is never overwritten. Give another path.")
    serialization, ed25519 = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write_new(private_path, private, 0o600)
    try:
        _write_new(public_path, public, 0o644)
    except CheckpointError:
        with suppress(OSError):
            private_path.unlink()  # without the public key, no signature could be verified
        raise
    return public_path


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise CheckpointError(f"the key {path} could not be written: {error}. Give another path.") from error


def read_private_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """The private key in the PEM file `path`.

    Raises:
        MissingExtraError: `cryptography` is not installed.
        ConfigurationError: the file cannot be read, or contains no Ed25519 key without a password.
    """
    serialization, ed25519 = _cryptography()
    data = _read(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except Exception as error:  # the bytes may be anything: ValueError, TypeError for a password, UnsupportedAlgorithm
        raise ConfigurationError(
            f"{os.fspath(path)} contains no usable private key ({_reason(error)}). Use the PEM file of an "
            "Ed25519 key without a password, as `trainstack checkpoints keygen FILE` makes it."
        ) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _another_kind(path, key)
    found: Ed25519PrivateKey = key
    return found


def read_public_key(path: str | os.PathLike[str]) -> Ed25519PublicKey:
    """The public key in the PEM file `path`. Raises as `read_private_key` does."""
    serialization, ed25519 = _cryptography()
    data = _read(path)
    if b"PRIVATE KEY" in data:
        raise ConfigurationError(
            f"{os.fspath(path)} is a private key, which signs. Use the public key, {os.fspath(path)}.pub, and keep "
            "the private one secret."
        )
    try:
        key = serialization.load_pem_public_key(data)
    except Exception as error:
        raise ConfigurationError(
            f"{os.fspath(path)} contains no public key ({_reason(error)}). Use the file with the suffix .pub that "
            "`trainstack checkpoints keygen FILE` wrote."
        ) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _another_kind(path, key)
    found: Ed25519PublicKey = key
    return found


def fingerprint_of(key: Ed25519PublicKey) -> str:
    """The SHA-256 of the 32 bytes of a public key, in hexadecimal digits."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_small(local_path(path, "key"), _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the key {os.fspath(path)} cannot be read: {error}. Give the path of a key."
        ) from error


def _another_kind(path: str | os.PathLike[str], key: object) -> ConfigurationError:
    return ConfigurationError(
        f"{os.fspath(path)} is a key of another kind ({type(key).__name__}). Signatures are made by Ed25519 keys, "
        "such as `trainstack checkpoints keygen FILE` makes."
    )


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtraError("signing checkpoints", "cryptography", "sign") from error
    return serialization, ed25519
