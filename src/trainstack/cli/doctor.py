"""`trainstack doctor` shows which backend strings work on this machine; `check_script.py` checks scripts."""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainstack import __version__
from trainstack.backends import DifferentialPrivacyArguments, legal_specs, parse_spec
from trainstack.checkpointing import DefaultCheckpointerArguments
from trainstack.cli.printing import FAILED, print_json, print_line, print_table
from trainstack.launching.launch import launch
from trainstack.trainer import SupervisedModule, Trainer, TrainerArguments

_EXTRAS = {
    "hub": "huggingface_hub",
    "dp": "opacus",
    "pld": "dp-accounting",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "trackio": "trackio",
    "comet": "comet_ml",
    "clearml": "clearml",
    "aim": "aim",
    "dvclive": "dvclive",
    "prometheus": "prometheus_client",
    "plot": "matplotlib",
    "notebook": "ipython",
    "remote": "s3fs",
    "gcs": "gcsfs",
    "optuna": "optuna",
    "ray": "ray",
    "sign": "cryptography",
    "sklearn": "scikit-learn",
    "demo": "statsmodels",
}
"""One package of each extra."""


def add(subparsers: Any) -> None:
    """Add the command."""
    about = "look for mistakes in a script; without one, print versions and try backend strings on this machine"
    script = "For FILE.py or FILE.py:MODULE, `trainstack doctor FILE.py --help` has the options."
    parser = subparsers.add_parser("doctor", help=about, description=about, epilog=script)
    parser.add_argument(
        "backends",
        metavar="FILE.py[:MODULE] | STRING",
        nargs="*",
        help="a script, or backend strings to try in one step of a small model; exit code 1 if one does not work",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--determinism",
        metavar="FILE.py:MODULE",
        help="train a few steps of this module twice instead, and name the values that differ; "
        "`trainstack doctor --determinism FILE.py:MODULE --help` has the options",
    )
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    for spec in args.backends:
        parse_spec(spec)
    problems = try_all(args.backends or legal_specs())
    installed = {"trainstack": __version__, "python": platform.python_version(), "torch": torch.__version__}
    extras = {extra: _version_of(package) for extra, package in _EXTRAS.items()}
    threads = torch.get_num_threads()
    if args.json:
        machine = {**installed, "devices": _devices(), "threads": threads}
        print_json({**machine, "extras": extras, "backends": problems})
    else:
        for name, found in installed.items():
            print_line(f"{name} {found}")
        print_line(f"threads of the CPU: {threads}")
        print_line(f"devices: {', '.join(_devices())}")
        print_line()
        rows = [[f"trainstack[{extra}]", _EXTRAS[extra], found or "not installed"] for extra, found in extras.items()]
        print_table(("extra", "package", "version"), rows)
        print_line()
        tried = [[spec, "works" if problem is None else f"NO: {problem}"] for spec, problem in problems.items()]
        print_table(("backend", "one step of a small model"), tried)
    return FAILED if args.backends and any(problem is not None for problem in problems.values()) else 0


def try_all(specs: Sequence[str]) -> dict[str, str | None]:
    """Each of `specs` with its error; None if a step was trained."""
    together = [spec for spec in specs if any(record.layer.joins_processes for record in parse_spec(spec))]
    found = try_each([spec for spec in specs if spec not in together])
    try:
        found |= launch(try_each, together, nproc=1, timeout_s=120.0)[0] if together else {}
    except Exception as error:  # the user asks for any error
        found |= dict.fromkeys(together, _describe_error(error))
    return {spec: found[spec] for spec in specs}


def try_each(specs: Sequence[str]) -> dict[str, str | None]:
    """`try_one` for each of `specs`, by string."""
    return {spec: try_one(spec) for spec in specs}


def try_one(spec: str) -> str | None:
    """Train one step of a small model with the backend `spec`; returns the error, or None."""
    private = any(DifferentialPrivacyArguments in record.layer.configured_by for record in parse_spec(spec))
    with tempfile.TemporaryDirectory(prefix="trainstack-doctor-") as directory:
        try:
            privacy = DifferentialPrivacyArguments(noise_multiplier=1.0, delta=1e-5)
            arguments = TrainerArguments(
                backend=spec,
                train_batch_size=4,
                max_train_steps_per_epoch=1,
                output_dir=Path(directory),
                checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),
                writers=[],
                progress="none",
                log_level="ERROR",
                handle_signals=False,
                differential_privacy_args=privacy if private else None,
            )
            data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
            Trainer(SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", data), arguments).train()
        except Exception as error:  # the user asks for any error
            return _describe_error(error)
    return None


def _describe_error(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _devices() -> list[str]:
    if not torch.accelerator.is_available():
        return ["cpu"]
    return ["cpu", f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"]


def _version_of(package: str) -> str | None:
    for name in (package, package.removesuffix("-skinny")):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
