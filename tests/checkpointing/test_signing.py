"""Signed checkpoints and exports: each kind of tampering is found and named."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpointing.sharded_support import write_sharded
from tests.checkpointing.support import flip_bit, make_checkpoint
from trainstack.checkpointing import (
    Checkpoint,
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    checkpoint_signer,
    export_model,
    list_checkpoints,
    make_key,
    manifest,
    sign_checkpoint,
    verify_checkpoint,
    verify_signature,
    write_checkpoint,
)
from trainstack.checkpointing.integrity import keys, signing
from trainstack.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingExtraError,
    SignatureError,
)

pytest.importorskip("cryptography", reason="signatures need pip install trainstack[sign]")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


def public(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def whole(folder: Path) -> Path:
    return write_checkpoint(make_checkpoint(1, step=4), folder, "checkpoint-000000004")


def sharded(folder: Path) -> Path:
    return write_sharded(make_checkpoint(1, step=4), folder, "checkpoint-000000004", 2)


def exported(folder: Path) -> Path:
    return export_model(nn.Linear(3, 2), folder / "export", global_step=4, max_shard_size="20B")


KINDS = {"whole": whole, "sharded": sharded, "exported": exported}


@pytest.fixture(params=list(KINDS))
def signed(request: pytest.FixtureRequest, tmp_path: Path, key: Path) -> Path:
    path = KINDS[request.param](tmp_path / "checkpoints")
    sign_checkpoint(path, key)
    return path


def test_signed_files_are_proved(signed: Path, key: Path) -> None:
    found = verify_signature(signed, public(key))

    content = manifest.read(signed / "MANIFEST.json")
    assert (found.name, found.kind, found.global_step) == (content.name, content.kind, 4)
    assert set(found.files) == {file.name for file in signed.iterdir()} - {"SIGNATURE.json"}
    assert found.public_key == keys.fingerprint_of(keys.read_public_key(public(key)))
    verify_checkpoint(signed)  # the manifest does not list the signature


def test_a_signature_goes_with_a_copy(signed: Path, key: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(signed, tmp_path / "copy")

    assert verify_signature(copy, public(key)) == verify_signature(signed, public(key))


def test_one_changed_bit_in_any_file_is_named(signed: Path, key: Path) -> None:
    for file in sorted(signed.iterdir()):
        before = file.read_bytes()
        for place in {0, len(before) // 2, len(before) - 1}:
            flip_bit(file, place)
            with pytest.raises(SignatureError) as refused:
                verify_signature(signed, public(key))
            assert file.name in str(refused.value)
            file.write_bytes(before)
    verify_signature(signed, public(key))


def test_each_byte_of_the_signature_counts(tmp_path: Path, key: Path) -> None:
    """Except for spaces between its tokens, which have no meaning."""
    path = whole(tmp_path)
    sign_checkpoint(path, key)
    file = path / "SIGNATURE.json"
    good = file.read_bytes()
    body = json.loads(good)
    for place in range(0, len(good), 7):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            verify_signature(path, public(key))
        except SignatureError:
            continue
        assert json.loads(file.read_bytes()) == body or good[place : place + 1] in b" \n"


def _cut(path: Path) -> str:
    file = next(file for file in sorted(path.iterdir()) if file.suffix == ".safetensors")
    os.truncate(file, file.stat().st_size - 1)
    return f"{file.name} has .* bytes, and .* were signed"


def _delete(path: Path) -> str:
    file = next(file for file in sorted(path.iterdir()) if file.suffix == ".safetensors")
    file.unlink()
    return f"{file.name} is missing"


def _add_code(path: Path) -> str:
    (path / "modeling.py").write_text("print('hello')\n")
    return "modeling.py was added"


def _add_a_huge_file(path: Path) -> str:
    """The file is not read: that would take hours."""
    with open(path / "huge", "wb") as file:
        file.truncate(1 << 40)
    return "huge was added"


def _grow(path: Path) -> str:
    os.truncate(path / "state.json", 1 << 40)
    return "state.json has 1099511627776 bytes"


def _add_in_a_folder(path: Path) -> str:
    (path / "inner").mkdir()
    (path / "inner" / "pytorch_model.bin").write_bytes(b"x")
    return "inner/pytorch_model.bin was added"


def _link(path: Path) -> str:
    """The same bytes, outside of the folder: they can be exchanged after the verification."""
    (path.parent / "outside.json").write_bytes((path / "state.json").read_bytes())
    (path / "state.json").unlink()
    (path / "state.json").symlink_to(path.parent / "outside.json")
    return "state.json is not a regular file"


def _exchange_all_but_the_signature(path: Path) -> str:
    """Another intact checkpoint in place of the signed one."""
    other = write_checkpoint(make_checkpoint(7, step=8), path.parent / "other", "checkpoint-000000008")
    return _give_signature(path, other)


def _give_signature(path: Path, other: Path) -> str:
    shutil.copy(path / "SIGNATURE.json", other / "SIGNATURE.json")
    shutil.rmtree(path)
    other.rename(path)
    return r"MANIFEST.json .* The signature is that of .*global step 4\), and checkpoint-000000008 \(.*step 8\) is here"


def _replace_manifest(path: Path) -> str:
    """The manifest of another step, with its own hash right, over the same files."""
    content = manifest.read(path / "MANIFEST.json")
    forged = dataclasses.replace(content, global_step=5)
    (path / "MANIFEST.json").write_bytes(manifest.render(forged))
    return r"MANIFEST.json has (other bytes|bytes, and).*global step 4\), and .*global step 5\) is here"


def _change_a_weight_and_the_manifest(path: Path) -> str:
    """All hashes of the library are correct, as after a write by an attacker."""
    checkpoint = dataclasses.replace(make_checkpoint(1, step=4), metadata={"note": "other"})
    signature = (path / "SIGNATURE.json").read_bytes()
    shutil.rmtree(path)
    write_checkpoint(checkpoint, path.parent, path.name)
    (path / "SIGNATURE.json").write_bytes(signature)
    verify_checkpoint(path)
    return "MANIFEST.json"


def _edit_list_of_files(path: Path) -> str:
    body = json.loads((path / "SIGNATURE.json").read_text())
    body["files"]["state.json"]["sha256"] = "0" * 64
    (path / "SIGNATURE.json").write_text(json.dumps(body))
    return "the signature does not match its content"


def _edit_step(path: Path) -> str:
    body = json.loads((path / "SIGNATURE.json").read_text())
    body["global_step"] = 1000
    (path / "SIGNATURE.json").write_text(json.dumps(body))
    return "the signature does not match its content"


def _empty_signature(path: Path) -> str:
    body = json.loads((path / "SIGNATURE.json").read_text())
    body["signature"] = base64.b64encode(bytes(64)).decode()
    (path / "SIGNATURE.json").write_text(json.dumps(body))
    return "the signature does not match its content"


def _unknown_algorithm(path: Path) -> str:
    body = json.loads((path / "SIGNATURE.json").read_text())
    body["algorithm"] = "none"
    (path / "SIGNATURE.json").write_text(json.dumps(body))
    return "is not a readable signature: the field 'algorithm'"


def _remove_signature(path: Path) -> str:
    (path / "SIGNATURE.json").unlink()
    return "is not signed"


TAMPERING: list[Callable[[Path], str]] = [
    _cut,
    _delete,
    _add_code,
    _add_in_a_folder,
    _add_a_huge_file,
    _grow,
    _link,
    _exchange_all_but_the_signature,
    _replace_manifest,
    _change_a_weight_and_the_manifest,
    _edit_list_of_files,
    _edit_step,
    _empty_signature,
    _unknown_algorithm,
    _remove_signature,
]


@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda one: one.__name__.strip("_"))
def test_tampering_is_named(signed: Path, key: Path, tamper: Callable[[Path], str]) -> None:
    message = tamper(signed)

    with pytest.raises(SignatureError, match=message):
        verify_signature(signed, public(key))


def test_the_key_of_another_person_is_refused(signed: Path, key: Path, tmp_path: Path) -> None:
    """Also where the attacker signs again, or puts the fingerprint of the right key into a signature by another one."""
    other = make_key(tmp_path / "other").with_name("other")
    with pytest.raises(SignatureError, match=r"was signed by the key [0-9a-f]{64}, and .*other\.pub is the key"):
        verify_signature(signed, public(other))
    sign_checkpoint(signed, other)
    with pytest.raises(SignatureError, match="was signed by the key"):
        verify_signature(signed, public(key))
    body = json.loads((signed / "SIGNATURE.json").read_text())
    body["public_key"] = keys.fingerprint_of(keys.read_public_key(public(key)))
    (signed / "SIGNATURE.json").write_text(json.dumps(body))
    with pytest.raises(SignatureError, match="the signature does not match its content"):
        verify_signature(signed, public(key))


def test_a_signature_for_another_purpose_is_refused(tmp_path: Path, key: Path) -> None:
    path = whole(tmp_path)
    made = sign_checkpoint(path, key)
    bare = signing._text_of(made).removeprefix(signing._PREFIX)
    body = json.loads((path / "SIGNATURE.json").read_text())
    body["signature"] = base64.b64encode(keys.read_private_key(key).sign(bare)).decode()
    (path / "SIGNATURE.json").write_text(json.dumps(body))

    with pytest.raises(SignatureError, match="the signature does not match its content"):
        verify_signature(path, public(key))


def test_nothing_damaged_and_no_link_is_signed(tmp_path: Path, key: Path) -> None:
    path = whole(tmp_path / "damaged")
    flip_bit(path / "model.safetensors", -1)
    with pytest.raises(CheckpointDamagedError):
        sign_checkpoint(path, key)
    linked = whole(tmp_path / "linked")
    (linked / "more").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="more cannot be signed: it is not a regular file"):
        sign_checkpoint(linked, key)
    with pytest.raises(CheckpointNotFoundError):
        sign_checkpoint(tmp_path / "nothing", key)
    with pytest.raises(CheckpointNotFoundError):
        verify_signature(tmp_path / "nothing", public(key))
    assert not (path / "SIGNATURE.json").exists()


def test_the_leftover_of_a_killed_signing_is_not_signed(tmp_path: Path, key: Path) -> None:
    path = whole(tmp_path)
    (path / ".tmp-SIGNATURE.json").write_text("{")
    sign_checkpoint(path, key)

    assert ".tmp-SIGNATURE.json" not in verify_signature(path, public(key)).files


class TestKeys:
    def test_the_private_key_is_unreadable_to_others_and_never_overwritten(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            made = make_key(tmp_path / "key")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
        assert b"PRIVATE" not in made.read_bytes()
        secret = (tmp_path / "key").read_bytes()
        with pytest.raises(CheckpointError, match="a key is never overwritten"):
            make_key(tmp_path / "key")
        (tmp_path / "key").unlink()
        with pytest.raises(CheckpointError, match=r"key\.pub exists"):
            make_key(tmp_path / "key")
        assert secret.startswith(b"-----BEGIN PRIVATE KEY-----")

    def test_other_files_are_refused_as_keys(self, tmp_path: Path, key: Path) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519

        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        curve = ec.generate_private_key(ec.SECP256R1())
        locked = serialization.BestAvailableEncryption(b"secret")
        files: dict[str, tuple[bytes, str]] = {
            "text": (b"hello", "contains no usable private key"),
            "curve": (curve.private_bytes(pem, pkcs8, serialization.NoEncryption()), "is a key of another kind"),
            "locked": (ed25519.Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, locked), "without a password"),
            "public": (public(key).read_bytes(), "contains no usable private key"),
        }
        for name, (data, message) in files.items():
            (tmp_path / name).write_bytes(data)
            with pytest.raises(ConfigurationError, match=message):
                keys.read_private_key(tmp_path / name)
        with pytest.raises(ConfigurationError, match="is a private key, which signs"):
            keys.read_public_key(key)
        with pytest.raises(ConfigurationError, match="cannot be read"):
            keys.read_public_key(tmp_path / "absent")
        with pytest.raises(
            ConfigurationError, match=r"text contains no public key .*Use the file with the suffix \.pub"
        ):
            keys.read_public_key(tmp_path / "text")

    def test_the_extra_is_named_where_the_package_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("cryptography.hazmat.primitives", "cryptography.hazmat.primitives.asymmetric"):
            monkeypatch.setitem(__import__("sys").modules, name, None)
        path = whole(tmp_path)
        uses: list[Callable[[], Any]] = [
            lambda: make_key(tmp_path / "key"),
            lambda: sign_checkpoint(path, tmp_path / "key"),
            lambda: verify_signature(path, tmp_path / "key.pub"),
            lambda: saver(tmp_path, tmp_path / "key").begin_run(resumed=False),
        ]
        for use in uses:
            with pytest.raises(MissingExtraError, match=r"pip install 'trainstack\[sign\]'"):
                use()


def saver(folder: Path, key: Path, **changes: Any) -> DefaultCheckpointer:
    args = DefaultCheckpointerArguments(save_dir=str(folder / "saved"), sign_key=str(key), **changes)
    return DefaultCheckpointer(args)


@pytest.mark.parametrize("async_save", [False, True])
def test_each_save_is_signed_and_retention_keeps_the_signatures(tmp_path: Path, key: Path, async_save: bool) -> None:
    checkpointer = saver(tmp_path, key, keep_last=2, keep_best=0, async_save=async_save)
    checkpointer.begin_run(resumed=False)
    for step in range(1, 5):
        checkpointer.save(make_checkpoint(step, step=step), step)
    checkpointer.finish()
    checkpointer.save_model({"weight": torch.ones(2)}, 4, global_step=4)
    checkpointer.save_aside(make_checkpoint(9, step=4), "exception-000000004")

    found = {
        info.name: verify_signature(info.path, public(key)).global_step for info in list_checkpoints(tmp_path / "saved")
    }
    assert found == {
        "checkpoint-000000003": 3,
        "checkpoint-000000004": 4,
        "checkpoint-model-000000004": 4,
        "exception-000000004": 4,
    }


def test_overwriting_a_signed_checkpoint_drops_the_old_signature(tmp_path: Path, key: Path) -> None:
    path = whole(tmp_path)
    sign_checkpoint(path, key)
    whole(tmp_path)

    with pytest.raises(SignatureError, match="is not signed"):
        verify_signature(path, public(key))
    write_checkpoint(make_checkpoint(1, step=4), tmp_path, path.name, sign=checkpoint_signer(key))
    verify_signature(path, public(key))


def test_a_wrong_key_ends_the_run_at_its_beginning(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        saver(tmp_path, tmp_path / "absent").begin_run(resumed=False)


def test_the_beginning_of_a_run_is_not_signed(tmp_path: Path, key: Path) -> None:
    checkpointer = saver(tmp_path, key)
    checkpointer.begin_run(resumed=False)
    checkpointer.save(Checkpoint(module_interface_state={}, global_step=1), 1)
    begin = next((tmp_path / "saved").glob("*begin*"))

    with pytest.raises(CheckpointMismatchError, match="marks the beginning"):
        sign_checkpoint(begin, key)
