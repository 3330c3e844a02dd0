"""The output of commands: no control character, no truncated name, an exit code for each result."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.patience import patience
from trainstack import _terminal
from trainstack.checkpointing import Checkpoint
from trainstack.cli import printing
from trainstack.cli.main import COMMANDS, READ_WORDS, _parser, main

NAME = "checkpoint-000000126"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint; its name is not ASCII."""
    place = tmp_path_factory.mktemp("output") / "résumé"
    metrics = {"val/loss": 0.25, "val/accuracy": float("inf")}
    checkpoint = Checkpoint(
        module_interface_state={"w": torch.ones(2)},
        metadata={"epoch": 1, "backend": "sp", "metrics": metrics},
        global_step=126,
    )
    ts.write_checkpoint(checkpoint, place, NAME)
    return place


def in_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, *words: str) -> str:
    """The output of a command in a terminal with `columns` columns."""
    leader, follower = pty.openpty()
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as inside, os.fdopen(follower, "w", encoding="utf-8") as stream:
        inside.setattr(sys, "stdout", stream)
        assert main(words) == 0
    shown = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:  # Linux raises it at the end
            part = b""
        if not part:
            break
        shown += part
    os.close(leader)
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        (40, "metrics, backend, created, size, epoch, kind"),
        (80, "metrics, backend, created"),
        (120, "metrics"),
        (160, ""),
    ],
)
def test_a_narrow_terminal_never_cuts_a_name(
    columns: int, left_out: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = in_a_terminal(monkeypatch, columns, "checkpoints", "ls", str(folder))
    head, row, *rest = shown.splitlines()
    assert row.split()[0] == NAME
    assert row.endswith("sizes agree")
    assert "126" in row
    assert len(head) <= columns
    assert rest == ([f"left out: {left_out}; --wide for all columns"] if left_out else [])
    wide = in_a_terminal(monkeypatch, columns, "checkpoints", "ls", "--wide", str(folder))
    assert "val/loss 0.25" in wide
    assert "left out" not in wide


HOSTILE = "\x1b]0;owned\x07\x9b31m\u202eexe.txt\u2066\r\nnext\x7f\u2028\ud800"


def test_no_control_character_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printing.escape(HOSTILE) == ("\\x1b]0;owned\\x07\\x9b31m\\u202eexe.txt\\u2066\\r\\nnext\\x7f\\u2028\\ud800")
    assert printing.escape("résumé 你好 ✓") == "résumé 你好 ✓"
    text = HOSTILE.replace("\ud800", "")
    states = {"module_interface_state": {text: torch.ones(1), "said": text}}
    for name, metadata in (("a", {"backend": text, "metrics": {text: 1.0}}), ("b", {"backend": "sp"})):
        ts.write_checkpoint(Checkpoint(**states, metadata=metadata), tmp_path, name)
    monkeypatch.setattr("trainstack.cli.checkpoints.CheckpointInfo", object, raising=False)
    for words in (
        ["ls", str(tmp_path)],
        ["show", str(tmp_path / "a")],
        ["diff", str(tmp_path / "a"), str(tmp_path / "b")],
    ):
        for more in ([], ["--json"]):
            main(["checkpoints", *words, *more])
            shown = capsys.readouterr()
            assert not _terminal._UNSAFE.search(shown.out.replace("\n", "")), (words, more)
    main(["checkpoints", "show", f"{tmp_path}/{text}"])
    main(["train", f"{text}.py:x"])
    main([text])
    said = capsys.readouterr().err
    assert said.count("\n") == 3
    assert not _terminal._UNSAFE.search(said.replace("\n", ""))


@pytest.mark.parametrize(
    "created", ["\x1b[31m2026", "yesterday", "9999-99-99T00:00:00", "", "2026-01-31T12:00:00+02:00"]
)
def test_only_valid_times_are_printed(created: str) -> None:
    assert printing.readable_date(created) == ("2026-01-31T10:00:00Z" if created.startswith("2026-") else None)


def test_only_the_printer_writes_to_streams() -> None:
    for file in Path(str(printing.__file__)).parent.glob("*.py"):
        if file.name not in ("printing.py", "main.py"):
            source = file.read_text(encoding="utf-8")
            assert not any(way in source for way in ("sys.stdout", "sys.stderr", "print(", "Console")), file


class TestStreams:
    """Failed output never gives exit code 1, which means damage or a difference."""

    def test_a_character_outside_the_encoding_is_escaped(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
        assert main(["checkpoints", "verify", str(folder)]) == 0
        assert b"r\\xe9sum\\xe9" in raw.getvalue()

    def test_a_closed_output_gives_exit_code_2(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        for words in (["checkpoints", "verify", str(folder)], ["plan", "--samples", "10"], ["explain", "sp"]):
            assert main(words) == 2
            assert capsys.readouterr().err.startswith("trainstack: standard output is closed")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
    def test_a_full_output_gives_exit_code_2(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for words in (["checkpoints", "verify", str(folder)], ["checkpoints", "diff", *[str(folder / NAME)] * 2]):
            with open("/dev/full", "w") as full:
                monkeypatch.setattr(sys, "stdout", full)
                assert main(words) == 2
            assert "No space left" in capsys.readouterr().err

    def test_a_closed_pipe_gives_exit_code_141(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert main(["checkpoints", "verify", str(folder)]) == 141

    @pytest.mark.processes
    @pytest.mark.parametrize(
        ("redirect", "code"), [(">&-", 2), ("> /dev/full", 2), ("| true; exit ${PIPESTATUS[0]}", 141)]
    )
    def test_the_process_ends_with_the_same_codes(self, redirect: str, code: int) -> None:
        command = f"{sys.executable} -m trainstack --help {redirect}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=patience(30), check=False
        )
        assert done.returncode == code or (
            code == 141 and done.returncode == 0
        )  # the command may write before `true` ends
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr


def test_a_fault_of_the_library_is_not_reported_as_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(path: object) -> Any:
        raise RuntimeError("a fault\nin the library")

    monkeypatch.setattr("trainstack.cli.checkpoints.verify_checkpoint", fails)
    assert main(["checkpoints", "verify", str(folder)]) == 2
    assert capsys.readouterr().err == (
        "trainstack: RuntimeError: a fault in the library (set TRAINSTACK_TRACEBACK=1 for the traceback)\n"
    )
    monkeypatch.setenv("TRAINSTACK_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="a fault"):
        main(["checkpoints", "verify", str(folder)])


KEYS = {
    ("explain", "sp"): {"backend", "text"},
    ("plan", "--samples", "10"): {"global_batch", "total_steps", "steps_per_epoch", "validations", "saves"},
    ("checkpoints", "ls", "{folder}"): {"checkpoints"},
    ("checkpoints", "verify", "{folder}"): {"checkpoints"},
    ("checkpoints", "show", "{folder}/" + NAME): {"name", "kind", "created", "states", "files", "versions"},
    ("checkpoints", "diff", "{folder}/" + NAME, "{folder}/" + NAME): {"same", "compared", "differences"},
    ("privacy", "epsilon", "--noise-multiplier", "0", "--sample-rate", "0.1", "--steps", "10", "--delta", "1e-5"): {
        "epsilon",
        "noise_multiplier",
        "sample_rate",
        "delta",
        "accountant",
        "prv",
        "rdp",
        "fixed_order",
        "shuffled_at_least",
        "assumes",
        "steps",
    },
}


@pytest.mark.parametrize("words", KEYS, ids=lambda words: "-".join(words[:2]))
def test_json_is_one_object_with_format_and_readable_infinities(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(folder=folder) for word in words] + ["--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert out.isascii()
    assert found.pop("format") == 1
    assert set(found) >= KEYS[words]
    if words[0] == "privacy":
        assert float(found["epsilon"]) == float("inf")
        assert not found["assumes"].startswith("assumes")
    if words[1] == "ls":
        assert float(found["checkpoints"][0]["metrics"]["val/accuracy"]) == float("inf")
        assert found["checkpoints"][0]["created"].endswith("Z")


@pytest.mark.parametrize("action", ["ls", "verify", "scrub", "lineage"])
def test_the_documentation_has_the_keys_of_the_json(
    action: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", action, str(folder / NAME if action == "lineage" else folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `checkpoints {action}` | `"))
    (entry,) = found.get("checkpoints") or found.get("entries") or [{}]
    assert set(re.findall("`([a-z_]+)`", row)) >= {*found, *entry} - {"format"}


def test_errors_are_json_with_the_option_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, kind in (
        (["checkpoints", "ls", str(tmp_path / "no"), "--json"], "CheckpointNotFoundError"),
        (["plan", "--json"], "UsageError"),
        (["explain", "amp-sp", "--json"], "BackendSpecError"),
    ):
        assert main(words) == 2
        said = json.loads(capsys.readouterr().err)
        assert (said["format"], said["class"]) == (1, kind)
        assert said["error"]


@pytest.mark.parametrize(
    ("words", "code"), [(["plan", "FILE:X"], 1), (["replay", "run", "FILE:X"], 2), (["doctor", "FILE"], 2)]
)
def test_an_error_of_the_user_is_one_json_object(
    words: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "unfinished.py"
    file.write_text("def f(:\n")
    assert main([word.replace("FILE", str(file)) for word in words] + ["--json"]) == code
    out, err = capsys.readouterr()
    said = json.loads(err)
    assert (out, said["class"], said["traceback"][-1]) == ("", "SyntaxError", "SyntaxError: invalid syntax")
    assert ("write them after --" in said["error"]) is (words[0] == "doctor")
    sys.modules.pop("unfinished", None)


@pytest.mark.processes
def test_other_writers_of_the_output_do_not_join_the_json() -> None:
    code = (
        "import os, subprocess, sys; from trainstack.cli.printing import only_json, print_json\n"
        "with only_json():\n"
        "    os.write(1, b'c '); print('code '); sys.__stdout__.write('kept '); subprocess.run(['echo', 'process '])\n"
        "    print_json({'a': 1})\n"
        "print('after')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(30), check=True
    )
    assert done.stdout == '{\n "format": 1,\n "a": 1\n}\nafter\n'
    assert sorted(done.stderr.split()) == ["c", "code", "kept", "process"]


@pytest.mark.processes
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["trian"], ["--nonsense"]])
def test_commands_that_need_no_torch_do_not_import_it(words: list[str]) -> None:
    probe = (
        "import sys; from trainstack.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, len(sys.modules) < 150)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=patience(30), check=True
    )
    assert done.stdout.splitlines()[-1] == "False False True"


@pytest.mark.processes
def test_listing_and_verifying_checkpoints_imports_no_torch(tmp_path: Path) -> None:
    weights = {"module_interface_state": {"weight": torch.ones(100)}, "trainer_state": {"betas": (0.9, 0.999)}}
    facts = {"metrics": {"val/loss": float("inf")}, "tuple": (1, {2}), "backend": "sp"}
    for name in ("good", "damaged"):
        ts.write_checkpoint(Checkpoint(**weights, global_step=3, plan={"seeds": (1,)}, metadata=facts), tmp_path, name)
    ts.export_model({"weight": torch.ones(2)}, tmp_path / "model")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "MANIFEST.json").write_bytes((tmp_path / "good" / "MANIFEST.json").read_bytes()[:-9])
    with (tmp_path / "damaged" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    probe = (
        "import sys; from trainstack.cli.main import main\n"
        "for words in ('ls', 'ls --json', 'ls --verify', 'verify', 'scrub'):\n"
        "    code = main(['checkpoints', *words.split(), sys.argv[1]])\n"
        "    print('answer:', code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command = [sys.executable, "-c", probe, os.fspath(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(30), check=True)
    answers = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("answer")]
    assert answers == [f"{code} False False" for code in (0, 0, 0, 1, 1)]
    assert "tensor 'weight', elements 0 to 100" in done.stdout


def test_metadata_with_values_of_torch_and_numpy_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"epoch": np.int64(7), "dtype": torch.float16, "device": torch.device("cpu"), "shape": torch.Size([2])}
    path = ts.write_checkpoint(Checkpoint(module_interface_state={}, metadata=facts), tmp_path, "a")
    assert main(["checkpoints", "ls", os.fspath(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["epoch"] == "7"
    assert ts.read_checkpoint(path).metadata == facts


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(READ_WORDS)))
def test_the_help_of_a_command_has_its_description(command: str) -> None:
    parser = _parser(command)
    choices = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    own = choices[command]
    assert own.description == COMMANDS[command].replace("%", "%%")


def test_names_of_files_are_escaped_in_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "\x1b]0;owned\x07\u202e").symlink_to("nowhere")
    ts.list_checkpoints(tmp_path)
    assert "\\x1b]0;owned\\x07\\u202e" in caplog.text
    assert "\x1b" not in caplog.text


PLAN = ["plan", "--samples", "8"]
TRAINS = """
import logging
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainstack import SupervisedModule

def make():
    print("by the file")
    logging.getLogger("trainstack").warning("a warning")
    return SupervisedModule(nn.Linear(1, 1), nn.MSELoss(), "sgd", TensorDataset(torch.ones(4, 1), torch.ones(4, 1)))
"""


@pytest.mark.parametrize(
    "words", [["-q", *PLAN], [*PLAN, "-qq"], [*PLAN, "--quiet"], ["plan", "-q", *PLAN[1:], "--json"]]
)
def test_a_quiet_command_has_only_an_exit_code(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*words, "--samples", "no"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "write a whole number" in err


def test_a_training_is_quiet_or_verbose(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy.py").write_text(TRAINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    logger, shown = logging.getLogger("trainstack"), dict[str, tuple[str, str]]()
    monkeypatch.setattr(logger, "propagate", False)  # pytest shows it
    before = logger.level, list(logger.handlers)
    for name in ("-q", "-v"):
        assert main(["train", "noisy.py:make", name, "--output_dir", name.strip("-"), "--progress", "plain"]) == 0
        shown[name] = tuple(capfd.readouterr())  # type: ignore[assignment]
    sys.modules.pop("noisy")

    assert shown["-q"][0] == ""
    assert "by the file" in shown["-v"][0]
    assert "WARNING: a warning" in shown["-v"][1]
    assert "INFO: " in shown["-v"][1]
    assert "INFO: " not in shown["-q"][1]
    assert (logger.level, logger.handlers) == before


def test_verbose_shows_the_traceback_of_an_error_inside_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINSTACK_TRACEBACK", raising=False)
    monkeypatch.setattr("trainstack.cli.explain.print_json", lambda value: 1 / 0)
    assert main(["explain", "sp", "--json"]) == 2
    with pytest.raises(ZeroDivisionError):
        main(["-v", "explain", "sp", "--json"])
    assert "TRAINSTACK_TRACEBACK" not in os.environ


@pytest.mark.parametrize(
    ("option", "variables", "bold"),
    [
        ("auto", {}, False),
        ("auto", {"FORCE_COLOR": "1"}, True),
        ("always", {}, True),
        ("always", {"NO_COLOR": "1", "TERM": "dumb"}, True),
        ("never", {"FORCE_COLOR": "1"}, False),
        ("never", {}, False),
    ],
)
def test_color_is_chosen_by_the_option_before_the_environment(
    option: str,
    variables: dict[str, str],
    bold: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ts.write_checkpoint(Checkpoint(module_interface_state={}), tmp_path, "a")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    for words in (["--color", option, "checkpoints", "ls"], ["checkpoints", "ls", f"--color={option}"]):
        assert main([*words, str(tmp_path)]) == 0
        assert ("\x1b[1mname" in capsys.readouterr().out) is bold
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--color", "blue", *PLAN], "--color blue: write auto, always, never."),
        ([*PLAN, "--color"], "--color: write auto, always, never."),
        ([*PLAN, "-qv"], "-q prints nothing, and -v prints more. Remove one of them."),
        (["-q", "-v", *PLAN], "-q prints nothing, and -v prints more. Remove one of them."),
    ],
)
def test_a_wrong_option_of_the_output_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"trainstack: {message}\n")


def test_words_of_a_script_are_no_options_of_the_output() -> None:
    words, output = printing.take_output_options(["doctor", "a.py", "-v", "--", "-q", "--color", "x"])
    assert words == ["doctor", "a.py", "--", "-q", "--color", "x"]
    assert output == printing.OutputOptions(verbose=True)
