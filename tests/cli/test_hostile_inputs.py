"""Files, variables and words are data: no name in them is imported, instantiated, called or evaluated."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

import trainstack as ts
from trainstack._kinds import Place
from trainstack._yaml import read_yaml
from trainstack.cli.main import main
from trainstack.cli.options import Inputs
from trainstack.trainer.plain_arguments import PlainInputs, kinds_of, parameters_of

TRACE = """
from pathlib import Path
Path({trace!r}).touch()
def function(*args, **kwargs):
    Path({trace!r}).touch()
    return True
class Class:
    def __init__(self, *args, **kwargs):
        Path({trace!r}).touch()
"""


def module(typed: int, layer: nn.Module | None = None, call: Callable[[], None] | None = None, untyped=None) -> Any:  # type: ignore[no-untyped-def]
    raise AssertionError("no module is made before the inputs are read")


PARAMETERS = {"module": parameters_of(module)}
PATHS = PlainInputs(ts.TrainerArguments, PARAMETERS).paths()

# Values of an attacker in YAML, for a file, an argument or a variable.
ATTACKS = {
    "class_path": "{class_path: trace_left.Class, init_args: {x: 1}}",
    "a class_path alone": "{class_path: trace_left.Class}",
    "a class_path in a list": "[{class_path: trace_left.Class, init_args: {x: 1}}]",
    "a deep class_path": "{a: {b: [{class_path: trace_left.function}]}}",
    "a tag": "!!python/object/apply:trace_left.function []",
    "a name tag": "!!python/name:trace_left.function ''",
    "a module tag": "!!python/module:trace_left ''",
    "a local tag": "!trace_left.function {}",
    "an anchor": "&a [1, *a]",
    "an alias in a mapping": "{a: &x trace_left, b: *x}",
    "deep": "[" * 40 + "]" * 40,
    "deep mappings": "{a: " * 40 + "1" + "}" * 40,
    "a merge": "{<<: {class_path: trace_left.Class}}",
    "__class__": "{__class__: trace_left.Class, __init__: [], __reduce__: trace_left.function}",
    "calls": "{_target_: trace_left.function, _partial_: true, func: trace_left.function}",
}
NAMES = (
    "trace_left.function",
    "trace_left:function",
    "os.system",
    "trace_left",
    "__import__('trace_left')",
    "{0.__class__}",
)
TEXTS = {path for path, kind in PATHS.items() if {str, Path} & kind.types or kind.anything}
"""Fields that accept any text, so also a name."""


@pytest.fixture(autouse=True)
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    left = tmp_path / "left"
    (tmp_path / "trace_left.py").write_text(TRACE.format(trace=str(left)))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield left
    assert not left.exists(), "an input ran code"
    assert "trace_left" not in sys.modules, "an input imported a module"


def give(way: str, path: tuple[str, ...], text: str, folder: Path) -> ts.TrainerArguments:
    """The arguments of an input that gives `text` for the value at `path`."""
    made = PlainInputs(ts.TrainerArguments, PARAMETERS)
    if way == "file":
        inner = text if len(path) == 1 else f"{{{path[1]}: {text}}}"
        (folder / "run.yaml").write_text(f"{path[0]}: {inner}\n")
        made.add_mapping(read_yaml(folder / "run.yaml"), "run.yaml")
    elif way == "word":
        made.add_text(path, text, Place(f"--{'.'.join(path)}", " "))
    else:
        made.add_text(path, text, Place("TRAINSTACK_" + "__".join(path).upper(), "="))
    return made.arguments()


def test_every_field_is_attacked() -> None:
    nested = {f.name: kinds_of(ts.TrainerArguments)[f.name].fields for f in dataclasses.fields(ts.TrainerArguments)}
    assert {path for path in PATHS if len(path) == 1} == {(name,) for name in nested}
    assert sum(cls is not None for cls in nested.values()) >= 5
    assert {("module", name) for name in ("typed", "layer", "call", "untyped")} <= set(PATHS)
    assert len(PATHS) > 100


@pytest.mark.parametrize("way", ["file", "word", "variable"])
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_an_attack_on_any_field_is_refused_by_name(way: str, attack: str, tmp_path: Path) -> None:
    modules = set(sys.modules)
    for path in PATHS:
        if way != "file" and path in TEXTS and path != ("module", "untyped"):
            continue  # such a field accepts any word as text
        if path == ("module", "untyped") and attack in ("__class__", "calls"):
            continue  # a dict of texts is a valid value of an unannotated parameter
        if path[0] == "fast_paths" and way == "variable":
            continue  # TRAINSTACK_FAST_PATHS is a switch of the library
        with pytest.raises(ts.ConfigurationError) as refused:
            give(way, path, ATTACKS[attack], tmp_path)
        name = "__".join(path).upper() if way == "variable" else path[-1]
        assert name in str(refused.value), f"{path}: {refused.value}"
        assert len(str(refused.value)) < 2500
    assert all(name.startswith(("yaml", "encodings")) for name in set(sys.modules) - modules)


@pytest.mark.parametrize("way", ["file", "word", "variable"])
def test_a_name_is_only_text(way: str, tmp_path: Path) -> None:
    for number, path in enumerate(PATHS):
        for name in (NAMES[number % len(NAMES)], NAMES[(number + 1) % len(NAMES)]):
            if path[0] == "fast_paths" and way == "variable":
                continue
            try:
                arguments = give(way, path, f'"{name}"' if way == "file" else name, tmp_path)
            except ts.ConfigurationError as error:
                said = str(error).lower()
            else:
                said = ""
            if said:
                unrelated = said.startswith("delta is missing")  # of privacy arguments, which need it in any case
                assert path not in TEXTS or path[-1] in said or path[0] in said or unrelated, path
                continue
            assert path in TEXTS, f"{path} took {name}"
            if len(path) == 1:
                assert str(getattr(arguments, path[0])) == name


VARIABLES = (
    "WRITERS",
    "BACKEND_OPTIONS",
    "COMPILE",
    "VALIDATE_EVERY",
    "DEVICE",
    "PROGRESS",
    "CHECKPOINTER_ARGS",
    "DISTRIBUTED_TRAINING_ARGS",
    "DIFFERENTIAL_PRIVACY_ARGS",
    "MODULE__LAYER",
)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_of_the_environment_runs_nothing(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from torch import nn\ndef module(layer: nn.Module = None): return 1\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for attack in list(ATTACKS.values())[::3]:
        monkeypatch.setenv(f"TRAINSTACK_{variable}", attack)
        assert main(["train", "mine.py:module"]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert f"TRAINSTACK_{variable}" in said.err


@pytest.mark.parametrize(
    "text",
    [
        "backend: ddp\nbackend_options: {ddp: {allow_pickle: true}}",
        "backend: ddp\nbackend_options: {ddp: {allow_pickle: 1}}",
        "backend_options: {ddp: {comm_hook: trace_left.function}}",
        "backend_options: {ddp: {environ: {A: b}}}",
        "backend_options: {ddp: {place: {class_path: x}}}",
        "backend_options: {ddp: {inner: x}}",
        "backend_options: {amp: {init_scale: [1]}}",
        "backend_options: {dp: {args: trace_left.function}}",
        "distributed_training_args: {local_rank: 0, global_rank: 0, world_size: 1, allow_pickle: true}",
        "compile: {options: {cpp.cxx: ./compiler}}",
        "compile: {backend: {class_path: trace_left.function}}",
        "compile: {backend: trace_left.function, options: {}}",
    ],
)
def test_options_that_could_run_code_are_refused_in_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ts.ConfigurationError, match=r"(compile|backend_options|distributed_training_args)"):
        ts.TrainerArguments.from_yaml(tmp_path / "run.yaml")


def test_ordinary_values_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        """
        # a usual file
        epochs: 3
        max_steps: 1e3
        train_batch_size: 64
        max_grad_norm: 5e-1
        max_time: 1:30:00
        writers: csv
        validate_every: {steps: 0.5}
        compile: {mode: reduce-overhead, dynamic: null}
        backend: ddp-bf16
        backend_options: {ddp: {gradient_as_bucket_view: true, timeout_s: 60}}
        rank_zero_timeout_s: .inf
        checkpointer_args:
          keep_last: 2
          every_n_steps: 100
        """
    )
    args = ts.TrainerArguments.from_yaml(tmp_path / "run.yaml")
    assert (args.epochs, args.max_steps, args.max_grad_norm, args.max_time) == (3, 1000, 0.5, "1:30:00")
    assert args.writers == ("csv",)
    assert args.validate_every == ts.Every(steps=0.5)
    assert args.compile == {"mode": "reduce-overhead", "dynamic": None}
    assert args.rank_zero_timeout_s == float("inf")
    assert args.checkpointer_args.every_n_steps == 100
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["backend_options"] == args.backend_options
    assert ts.TrainerArguments.from_dict(args.to_dict()) == args


def test_options_of_commands_are_texts_numbers_or_paths() -> None:
    """Each option of each command is text, or a number that Python parses."""
    from trainstack.cli.main import COMMANDS, _parser

    parsers = [_parser(command) for command in COMMANDS]
    own = argparse.ArgumentParser()
    Inputs(own, module)
    seen = 0
    pending: list[argparse.ArgumentParser] = [*parsers, own]
    while pending:
        for action in pending.pop()._actions:
            seen += 1
            assert action.type in (None, int, float, Path), action
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
    assert seen > 150
