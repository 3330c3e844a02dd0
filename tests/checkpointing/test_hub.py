"""Exports are uploaded to a hub of models, here a local stand-in for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.hub import Hub, running_hub
from tests.helpers.modules import Classifier, arguments, train


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with running_hub() as running:
        yield running


@pytest.mark.spec("HZ-34")
def test_a_trainer_pushes_its_exports(hub: Hub, tmp_path: Path) -> None:
    trainer = train(Classifier(), tmp_path)
    url = trainer.push_to_hub("me/line", endpoint=hub.url, token="hf_secret", commit_message="First", private=True)

    assert url == f"{hub.url}/me/line/commit/{'1' * 40}"
    assert [repo["name"] for repo in hub.made] == ["line"]
    assert hub.made[0].get("private") is True or hub.made[0].get("visibility") == "private"  # older and newer clients
    assert [(commit["revision"], commit["summary"]) for commit in hub.commits] == [("main", "First")]
    assert hub.tokens >= {"Bearer hf_secret"}
    trainer.export(tmp_path / "export" / "line")
    exported = {file.name for file in (tmp_path / "export" / "line").iterdir()}
    assert set(hub.files) == exported
    assert b"# line" in hub.files["README.md"]

    back = tmp_path / "back"
    back.mkdir()
    for name, content in hub.files.items():
        (back / name).write_bytes(content)
    state = ts.read_model(back)
    assert all(torch.equal(state[name], value) for name, value in trainer.module.get_state().items())


def test_an_export_is_pushed_to_a_branch_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    path = ts.export_model(torch.nn.Linear(2, 1), tmp_path / "line")
    for revision in (None, "try"):
        ts.push_to_hub(path, "me/line", revision=revision, endpoint=hub.url, token="hf_secret")
    assert [commit["revision"] for commit in hub.commits] == ["main", "try"]


def test_a_refusal_of_the_server_is_an_error(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    path = ts.export_model(torch.nn.Linear(2, 1), tmp_path / "line")
    hub.refuses = True
    with pytest.raises(HfHubHTTPError, match="403"):
        ts.push_to_hub(path, "me/line", endpoint=hub.url, token="hf_secret")


def test_only_exports_are_pushed(tmp_path: Path) -> None:
    saved = train(Classifier(), tmp_path, checkpointer_args=ts.DefaultCheckpointerArguments())
    for path in (tmp_path / "nothing", saved.checkpointer.save_dir / "checkpoint-000000006"):  # type: ignore[attr-defined]
        with pytest.raises(ts.ConfigurationError, match="this is not an export"):
            ts.push_to_hub(path, "me/line")


@pytest.mark.spec("HZ-34")
def test_a_checkpoint_is_pushed_only_on_request(hub: Hub, tmp_path: Path) -> None:
    saved = train(Classifier(), tmp_path, checkpointer_args=ts.DefaultCheckpointerArguments())
    path = saved.checkpointer.save_dir / "checkpoint-000000006"  # type: ignore[attr-defined]
    with pytest.raises(ts.ConfigurationError, match="write allow_checkpoint=True"):
        ts.push_to_hub(path, "me/line", endpoint=hub.url, token="hf_secret")
    ts.push_to_hub(path, "me/line", endpoint=hub.url, token="hf_secret", allow_checkpoint=True)
    assert set(hub.files) == {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@pytest.mark.spec("HZ-34")
def test_checkpoint_and_logs_go_into_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    saves = ts.DefaultCheckpointerArguments()
    trainer = train(Classifier(), tmp_path / "run", checkpointer_args=saves, writers=["csv"])
    trainer.push_to_hub("me/line", include=("checkpoint", "logs"), endpoint=hub.url, token="hf_secret")
    assert len(hub.commits) == 1
    assert {"README.md", "checkpoint/MANIFEST.json", "logs/metrics.csv"} <= set(hub.files)
    for name, content in hub.files.items():
        file = tmp_path / "back" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    resume = arguments(tmp_path / "new", resume=str(tmp_path / "back" / "checkpoint"))
    back = ts.Trainer(Classifier(), resume)
    assert back.plan.total_steps == back.state.global_step == 6
    assert ts.read_model(tmp_path / "back").keys() == trainer.module.get_state().keys()
    with pytest.raises(ts.ConfigurationError, match="write 'checkpoint', 'logs' or both"):
        trainer.push_to_hub("me/line", include=("code",))  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="has saved no checkpoint"):
        train(Classifier(), tmp_path / "unsaved").push_to_hub("me/line", include=("checkpoint",), endpoint=hub.url)


def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "huggingface_hub" else find(name, *a)
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("exported")

    trainer = ts.Trainer(Classifier(), arguments(tmp_path))
    monkeypatch.setattr("trainstack.checkpointing.export_model", refuse)
    with pytest.raises(ts.MissingExtraError, match=r"pip install 'trainstack\[hub\]'"):
        trainer.push_to_hub("me/line")
