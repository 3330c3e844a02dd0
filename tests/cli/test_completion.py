"""Completion in shells, the texts of the help, and flags without a value."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from trainstack import TrainerArguments
from trainstack.cli.main import COMMANDS, READ_WORDS, _parser, main, module_of

NESTED = {f"--{name}" for name in ("checkpointer_args", "stats_args", "writer_args", "default_callbacks")} | {
    "--distributed_training_args",
    "--differential_privacy_args",
}
"""Fields with fields, and one that takes objects only."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, in a file."""
    folder, found = tmp_path_factory.mktemp("completion"), {}
    with pytest.MonkeyPatch.context() as patch:
        for shell in ("bash", "zsh", "fish"):
            found[shell] = folder / shell
            with open(found[shell], "w", encoding="utf-8") as output:
                patch.setattr("sys.stdout", output)
                assert main(["completion", shell]) == 0
    return found


def complete_in_bash(script: Path, *words: str) -> list[str]:
    given = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=(trainstack {given}); COMP_CWORD={len(words)}; _trainstack; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_actions_and_options(scripts: dict[str, Path]) -> None:
    assert set(complete_in_bash(scripts["bash"], "")) == {
        *COMMANDS,
        *("--help", "--version", "--quiet", "--verbose", "--color"),
    }
    assert complete_in_bash(scripts["bash"], "checkpoints", "ex") == ["export"]
    assert complete_in_bash(scripts["bash"], "checkpoints", "diff", "a", "--mo") == ["--model"]
    assert complete_in_bash(scripts["bash"], "train", "my.py:X", "--epochs", "3", "--checkpointer_args.keep_l") == [
        "--checkpointer_args.keep_last"
    ]
    assert complete_in_bash(scripts["bash"], "plan", "--sam") == ["--samples"]
    assert complete_in_bash(scripts["bash"], "predict", "my.py:X", "runs/a", "--outp") == ["--output", "--output_dir"]


def test_each_script_has_every_command_and_option(scripts: dict[str, Path]) -> None:
    for shell, script in scripts.items():
        text = script.read_text(encoding="utf-8")
        for word in (*COMMANDS, "lineage", "best-of", "max-shard-size", "gpu_batch_size_limit"):
            assert word in text, (shell, word)


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_run_their_scripts(shell: str, scripts: dict[str, Path]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    done = subprocess.run([shell, str(scripts[shell])], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, others in ((["help"], ["--help"]), (["help", "checkpoints", "ls"], ["checkpoints", "ls", "--help"])):
        shown = []
        for given in (words, others):
            with pytest.raises(SystemExit) as end:
                main(given)
            assert end.value.code == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1] != ""


def options_without_text(parser: argparse.ArgumentParser, name: str) -> list[str]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            own = {one: each for one, each in action.choices.items() if each.add_help}
            found += [text for one, each in own.items() for text in options_without_text(each, f"{name} {one}")]
        elif not (action.help or "").strip():
            found.append(f"{name} {action.dest}")
    return found


def test_every_option_has_a_text() -> None:
    for command in COMMANDS:
        parser = module_of(command).make_parser(command) if command in READ_WORDS else _parser(command)
        assert options_without_text(parser, "trainstack") == []


def test_the_help_of_train_shows_the_most_used_options(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            main(["train", word])
        assert end.value.code == 0
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert short.count("\n") < 80
    assert "--checkpointer_args.keep_last" in short
    assert "--lease_timeout_s" not in short
    assert {f"--{field.name}" for field in dataclasses.fields(TrainerArguments)} <= {
        word.rstrip(",") for line in whole.splitlines() for word in line.split()[:1]
    } | NESTED
    for text in texts:
        assert "seed_everything(seed)` before" not in text


def test_a_flag_needs_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saves(*words: str) -> str:
        assert main(["plan", "--samples", "8", "--json", *words]) == 0
        found: str = json.loads(capsys.readouterr().out)["saves"]
        return found

    name = "--checkpointer_args.checkpoint"
    assert saves("--checkpointer_args.no-checkpoint") == saves(f"{name}=false") == saves(name, "false") == "never"
    assert saves(name) == saves(name, "--epochs", "1") == saves("--checkpointer_args.no_checkpoint", name) != "never"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--verison"], "unrecognized arguments: --verison. Did you mean --version? (see trainstack --help)"),
        (["checkpoints", "lst"], "there is no action 'lst'. Did you mean 'ls'? (see trainstack checkpoints --help)"),
        (
            ["completion", "tcsh"],
            "there is no shell 'tcsh'. There are bash, zsh, fish. (see trainstack completion --help)",
        ),
        (["privacy", "cost"], "there is no question 'cost'. There are "),
        (["compare", "a"], "the following arguments are required: RUN (see trainstack compare --help)"),
        (["plan", "--samples", "many"], "--samples many: write a whole number. (see trainstack plan --help)"),
        (
            ["privacy", "epsilon", "--noise-multiplier", "x"],
            "--noise-multiplier x: write a number. (see trainstack privacy epsilon --help)",
        ),
    ],
)
def test_a_wrong_word_gets_its_correction(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trainstack: {line}")
    assert error.count("\n") == 1
