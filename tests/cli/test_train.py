"""`trainstack train` trains the module of a file, with every argument of the trainer as an option."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import yaml

import trainstack as ts
from trainstack.cli.main import main

FILE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sizes
import trainstack as ts
from trainstack import SupervisedModule


class Line(SupervisedModule):
    def __init__(self, hidden: int = 4, lr: float = 0.1):
        """A line.

        Args:
            hidden: units in between.
            lr: learning rate.
        """
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        net = nn.Sequential(nn.Linear(1, hidden), nn.Linear(hidden, 1))
        super().__init__(net, nn.MSELoss(), "sgd", TensorDataset(x, 2 * x), optimizer_kwargs={"lr": lr})


class Breaks(Line):
    def on_end_train_step(self, global_step):
        raise OSError("in the user's code")


class Opens(Line):
    def __init__(self, file: str = "no/such/data.csv"):
        open(file)


class Refused(Line):
    def __init__(self):
        raise ts.ConfigurationError("in the user's code")


def opens():
    return Opens()


class Other:
    pass


def make(units: int):
    return Line(units * sizes.TWO)
'''
QUIET = ["--train_batch_size", "8", "--writers", "[csv]", "--progress", "none", "--log_every", "1"]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.py").write_text(FILE)
    (tmp_path / "sizes.py").write_text("TWO = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my", "sizes", "reads"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def printed_config(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["train", "my.py:Line", *words, "--print_config"]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


def test_options_override_variables_and_variables_override_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(
        "epochs: 5\ntrain_batch_size: 5\nmax_grad_norm: 5e-1\nseed: 5\n"
        "checkpointer_args: {keep_last: 5, keep_best: 5}\n"
    )
    monkeypatch.setenv("TRAINSTACK_EPOCHS", "6")
    monkeypatch.setenv("TRAINSTACK_TRAIN_BATCH_SIZE", "6")
    monkeypatch.setenv("TRAINSTACK_CHECKPOINTER_ARGS__KEEP_LAST", "6")
    config = printed_config(capsys, "--epochs", "7", "--config", "run.yaml", "--module.lr", "0.5")
    assert [config[name] for name in ("epochs", "train_batch_size", "seed", "max_grad_norm")] == [7, 6, 5, 0.5]
    saving = config["checkpointer_args"]
    assert isinstance(saving, dict)
    assert (saving["keep_last"], saving["keep_best"]) == (6, 5)
    assert config["module"] == {"hidden": 4, "lr": 0.5}
    monkeypatch.setenv("TRAINSTACK_CONFIG", "run.yaml")
    assert printed_config(capsys, "--epochs", "7", "--module.lr", "0.5") == config


def test_every_field_is_an_option_and_in_the_printed_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = printed_config(capsys, "--device", "cpu", "--writers", "[csv,jsonl]", "--resume", "auto")
    own = {name: value for name, value in config.items() if name != "module"}
    assert set(own) == {field.name for field in dataclasses.fields(ts.TrainerArguments)}
    expected = ts.TrainerArguments(device="cpu", writers=["csv", "jsonl"], resume="auto")
    assert ts.TrainerArguments.from_dict(own) == expected
    Path("printed.yaml").write_text(yaml.safe_dump(config))
    assert printed_config(capsys, "--config", "printed.yaml") == config


def test_an_option_creates_nested_arguments_that_default_to_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = printed_config(capsys, "--stats_args.log_steps", "7")
    assert config["stats_args"] == {"log_steps": 7}
    assert config["writer_args"] is None


def test_two_trainings_with_equal_options_have_equal_histories() -> None:
    histories = []
    for directory in ("one", "other"):
        words = ["my.py:Line", *QUIET, "--epochs", "2", "--module.hidden", "3", "--output_dir", directory]
        assert main(["train", *words, "--backend", "sp-bf16"]) == 0
        histories.append(ts.read_history(directory).to_dict())
    assert histories[0]["train/loss"]["step"] == list(range(1, 9))
    assert histories[0] == histories[1]


def test_a_function_can_make_the_module_and_import_neighbouring_files() -> None:
    assert main(["train", "my.py:make", *QUIET, "--module.units", "3", "--output_dir", "out"]) == 0
    assert main(["train", "my:make", *QUIET, "--module.units", "3", "--output_dir", "again"]) == 0
    weights = ts.read_model(next(Path("out/checkpoints").glob("*model*")))
    assert weights["model.0.weight"].shape == (6, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs the module before any option"),
        (["--epochs", "3"], "needs the module before any option"),
        (["my.py"], "'my.py' does not say where a module comes from. Write FILE.py:NAME"),
        (["me.py:Line"], "there is no file me.py"),
        (["mine.deep:Line"], "there is no Python module 'mine.deep'"),
        (["my.py:Lin"], "Did you mean 'Line'? It has the modules Breaks, Line, Opens, Refused."),
        (["my.py:Other"], "the class Other is not a ModuleInterface. It has the modules Breaks, Line, Opens, Refused."),
        (["my.py:Line", "--epochs", "x"], "--epochs x: write a whole number, 0 or more."),
        ([".my:Line"], "'.my' begins with a dot, and there is no package that it could belong to. Write FILE.py:NAME"),
        (["./my:Line"], "'./my' begins with a dot"),
        (["my.py:Line", "--epoch", "3"], "unrecognized arguments: --epoch 3. Did you mean --epochs? (see"),
        (
            ["my.py:Line", "--keep_last=3", "--train-batch-sise", "8", "--zzzz=--epoch"],
            "8 --zzzz=--epoch. Did you mean --checkpointer_args.keep_last and --train_batch_size? (see",
        ),
        (["my.py:Line", "--zzzz", "3"], "unrecognized arguments: --zzzz 3 (see"),
        (["my.py:Line", "--max-epochs", "3"], "--max-epochs 3. Did you mean --epochs? (see"),
        (["my.py:Line", "--lr=3"], "--lr=3. Did you mean --module.lr? (see"),
        (
            ["my.py:Line", "--gradient_clip_val", "1", "--epoch", "3"],
            ". For --gradient_clip_val write max_grad_norm, or clip_grads=False. Did you mean --epochs? (see",
        ),
        (["my.py:Line", "--callbacks", "[EMA]"], "[EMA]. For --callbacks write Trainer(module, args, callbacks=[...])"),
        (["my.py:Line", "--epochs", "-1"], "--epochs -1: write a whole number, 0 or more."),
        (["my.py:Line", "--nonfinite", "fly"], "--nonfinite fly: write raise or skip."),
        (["my.py:Line", "--backend", "amp-ddp"], "Write 'ddp-amp'."),
        (["my.py:Line", "--config", "wrong.yaml"], "wrong.yaml has no argument 'epchs'. Write epochs."),
        (["my.py:Line", "--config", "none.yaml"], "there is no file 'none.yaml' to read arguments from."),
        (["my.py:Line", "--config"], "--config"),
        (["my.py:Line", "--module.hiden", "3"], "--module.hiden 3. Did you mean --module.hidden?"),
        (["my.py:make"], "my.py:make has to be given --module.units."),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    Path("wrong.yaml").write_text("epchs: 3\n")
    assert main(["train", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("trainstack: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my.py:Breaks", "OSError: in the user's code"),
        ("my.py:Opens", "No such file or directory: 'no/such/data.csv'"),
        ("my.py:opens", "No such file or directory: 'no/such/data.csv'"),
        ("my.py:Refused", "ConfigurationError: in the user's code"),
        ("reads.py:Line", "No such file or directory: 'config.yaml'"),
        ("reads:Line", "No such file or directory: 'config.yaml'"),
    ],
)
def test_an_error_in_the_users_code_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    Path("reads.py").write_text("from my import Line\nopen('config.yaml')\n")
    assert main(["train", target, *QUIET]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert f'{target.partition(":")[0].removesuffix(".py")}.py", line' in shown


@pytest.mark.parametrize("command", ["train", "plan", "doctor", "validate", "test", "predict"])
def test_an_exit_in_the_users_file_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("exits.py").write_text(FILE + "import sys\nsys.exit(0)\n")
    assert main([command, "exits.py:Line"]) in (1, 2)
    shown = capsys.readouterr().err
    assert "SystemExit: 0" in shown
    assert 'exits.py", line' in shown


def test_an_exit_in_a_hook_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    exits = "\n\nclass Exits(Line):\n    def on_end_train_step(self, global_step):\n        raise SystemExit\n"
    Path("exits.py").write_text(FILE + exits)
    assert main(["train", "exits.py:Exits", *QUIET]) == 1
    assert 'exits.py", line' in capsys.readouterr().err


def test_a_file_may_be_named_with_dots_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    assert main(["train", "../my.py:Line", *QUIET]) == 0


def test_help_lists_the_options_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--help"], "passes over the training data"),
        (["my.py:Line", "--help"], "units in between"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
        assert ended.value.code in (0, None)
        assert expected in " ".join(capsys.readouterr().out.split())


DEFAULTS = """
import enum
import numpy as np
from my import Line

class Colour(str, enum.Enum):
    RED = "red"

SHARED = [1, 2]

def make(rate="1e-3", big="1e5", words="*a &b !c", seen="yes", one=SHARED, two=SHARED, half=np.float64(0.5),
         colour=Colour.RED, limit=float("inf"), kind=int):
    assert (rate, big, words, seen, one, two) == ("1e-3", "1e5", "*a &b !c", "yes", [1, 2], [1, 2])
    assert type(half) is np.float64 and colour is Colour.RED and limit == float("inf") and kind is int
    return Line()
"""


def test_the_printed_file_keeps_any_defaults_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    Path("defaults.py").write_text(DEFAULTS)
    assert main(["train", "defaults.py:make", "--print_config"]) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert main(["train", "defaults.py:make", *QUIET, "--epochs", "1", "--config", "printed.yaml"]) == 0
    sys.modules.pop("defaults")


@pytest.mark.parametrize("number", ["-1e-3", "-.5", "-3", "-.inf"])
def test_a_negative_number_needs_no_equals_sign(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = printed_config(capsys, "--module.lr", number)["module"]
    assert isinstance(module, dict)
    assert module["lr"] == float(number.replace(".inf", "inf"))


@pytest.mark.parametrize("name", ["queue", "code", "torch"])
def test_a_file_named_like_another_module_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.modules.get(name)
    Path(f"{name}.py").write_text(FILE)
    assert main(["train", f"{name}.py:Line", *QUIET]) == 2
    assert "Rename the file" in capsys.readouterr().err
    assert sys.modules.get(name) is before


def test_a_variable_for_two_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("two.py").write_text("from my import Line\ndef make(lr=0.1, LR=0.2):\n    return Line()\n")
    monkeypatch.setenv("TRAINSTACK_MODULE__LR", "0.3")
    assert main(["train", "two.py:make", *QUIET]) == 2
    assert "--module.lr and --module.LR" in capsys.readouterr().err
    sys.modules.pop("two")


def test_a_variable_in_small_letters_gets_its_correction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINSTACK_epochs", "3")
    assert main(["train", "my.py:Line", *QUIET]) == 2
    assert "Did you mean TRAINSTACK_EPOCHS?" in capsys.readouterr().err
