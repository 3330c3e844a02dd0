"""`TrainerArguments` from dicts and YAML files."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import trainstack as ts


@pytest.mark.spec("PMT-04")
class TestFromDictAndYaml:
    def test_a_dict_and_a_yaml_file_give_equal_arguments(self, tmp_path: Path) -> None:
        args = ts.TrainerArguments(
            epochs=3, max_grad_norm=0.5, checkpointer_args=ts.DefaultCheckpointerArguments(period=2), writers=["csv"]
        )
        path = tmp_path / "run.yaml"
        path.write_text("epochs: 3\nmax_grad_norm: 5e-1\nwriters: [csv]\ncheckpointer_args:\n  period: 2\n")

        assert ts.TrainerArguments.from_dict(args.to_dict()) == ts.TrainerArguments.from_yaml(path)
        assert ts.TrainerArguments.from_yaml(path).checkpointer_args.period == 2

    def test_an_error_for_an_unknown_key_suggests_the_correct_one(self) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"no argument 'epoch'\. Write epochs\."):
            ts.TrainerArguments.from_dict({"epoch": 1})
        with pytest.raises(ts.ConfigurationError, match="checkpointer_args has no argument 'perod'"):
            ts.TrainerArguments.from_dict({"checkpointer_args": {"perod": 1}})

    @pytest.mark.parametrize(
        ("name", "answer"),
        [
            ("epoch", "TrainerArguments has no argument 'epoch'. Write epochs."),
            ("num_train_epochs", "Write epochs."),
            ("lr", "in get_optimizers_schedulers."),
            ("batch_size", "Write train_batch_size"),
            ("zzz", "The arguments are activation_checkpointing, "),
        ],
    )
    def test_an_error_for_an_unknown_keyword_suggests_the_correct_one(self, name: str, answer: str) -> None:
        with pytest.raises(ts.ConfigurationError, match=re.escape(answer)):
            ts.TrainerArguments(**{name: 1})
        with pytest.raises(ts.ConfigurationError, match=r"DefaultCheckpointerArguments .* Write keep_last\."):
            ts.DefaultCheckpointerArguments(keep=1)  # type: ignore[call-arg]
        assert "epochs" in inspect.signature(ts.TrainerArguments).parameters

    def test_a_file_without_a_mapping_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "list.yaml").write_text("- 1\n")
        with pytest.raises(ts.ConfigurationError, match="write a mapping"):
            ts.TrainerArguments.from_yaml(tmp_path / "list.yaml")
        with pytest.raises(ts.ConfigurationError, match="there is no file"):
            ts.TrainerArguments.from_yaml(tmp_path / "absent.yaml")
        (tmp_path / "bad.yaml").write_text("a: [1\n")
        with pytest.raises(ts.ConfigurationError, match="not valid YAML"):
            ts.TrainerArguments.from_yaml(tmp_path / "bad.yaml")

    def test_arguments_below_another_key_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "sections.yaml").write_text("tr:\n  nonsense: 1\n  epochs: 3\n")
        with pytest.raises(ts.ConfigurationError, match=r"top of the file: write epochs: 3 without tr\.$"):
            ts.TrainerArguments.from_yaml(tmp_path / "sections.yaml")

    def test_arguments_are_equal_by_value_and_frozen(self) -> None:
        assert ts.TrainerArguments() == ts.TrainerArguments()
        with pytest.raises(AttributeError):
            ts.TrainerArguments().epochs = 3  # type: ignore[misc]
