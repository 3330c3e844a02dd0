"""`amp-apex`: the installed apex, the message for a wrong one, and the layer on apex's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.apex_shim import ROOT, SHA256, get_wheel
from tests.helpers.modules import Classifier, arguments
from tests.helpers.patience import patience
from trainstack.backends.apex import probe
from trainstack.backends.workload import Workload

NEVER_RUN = "raise RuntimeError('the probe ran code of a package that it had no reason to trust')"
Install = Callable[[dict[str, str]], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put files where Python finds packages; their imports are removed afterwards."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]:
            monkeypatch.delitem(sys.modules, name)

    def put(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / "site")
        return tmp_path / "site" / "apex"

    forget()
    yield put
    for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


def nvidias(init: str = "", amp: str | None = "", version: str = "0.1") -> dict[str, str]:
    """The files of an NVIDIA apex; without amp if that is None."""
    files = {
        "apex/__init__.py": init,
        "apex/multi_tensor_apply/__init__.py": "",
        "apex/normalization/__init__.py": "",
        f"apex-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n",
        f"apex-{version}.dist-info/top_level.txt": "apex\n",
    }
    return files if amp is None else {**files, "apex/amp/__init__.py": amp, "apex/amp/frontend.py": ""}


PYRAMID = {
    "apex/__init__.py": NEVER_RUN,
    "apex/lib/__init__.py": "",
    "apex-0.9.10.dev0.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n",
    "apex-0.9.10.dev0.dist-info/top_level.txt": "apex\n",
}
OLD = nvidias(amp="from torch._six import string_classes")
WORKS = nvidias(amp="def initialize(): ...")


# --- the probe


def test_a_missing_apex_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)  # type: ignore[arg-type]

    assert probe().kind == "absent"
    assert (probe().location, probe().distribution, probe().has_cuda_ext) == (None, None, False)


def test_the_web_framework_is_not_nvidias_apex(install: Install) -> None:
    place = install(PYRAMID)
    found = probe()

    assert (found.kind, found.location, found.distribution) == ("not-nvidia", str(place), "apex 0.9.10.dev0")


def test_a_clone_of_the_repository_is_not_a_package(install: Install) -> None:
    """Python finds a clone of the repository in the working directory as a package, without a module in it."""
    install({f"apex/{name}": text for name, text in nvidias(NEVER_RUN).items()})

    assert probe().kind == "not-nvidia"
    assert "Install it from there" in probe().detail


def test_a_module_called_apex_is_not_nvidias(install: Install) -> None:
    install({"apex.py": NEVER_RUN})

    assert probe().kind == "not-nvidia"
    assert str(probe().location).endswith("apex.py")


def test_an_apex_without_amp_is_recognized(install: Install) -> None:
    install({**nvidias(NEVER_RUN, amp=None), "amp_C.py": NEVER_RUN})

    assert (probe().kind, probe().distribution, probe().has_cuda_ext) == ("no-amp", "apex 0.1", True)


def test_an_apex_too_old_for_this_torch_is_broken(install: Install) -> None:
    install(OLD)
    found = probe()

    assert found.kind == "broken"
    assert found.detail.startswith("ModuleNotFoundError: No module named 'torch._six'")
    assert "older than 2023-02-15" in found.detail


def test_an_apex_whose_import_fails_is_broken(install: Install) -> None:
    install(nvidias(init="raise OSError('undefined symbol: x')"))

    assert (probe().kind, probe().detail) == ("broken", "OSError: undefined symbol: x")


def test_an_apex_with_amp_is_recognized(install: Install) -> None:
    install(WORKS)

    assert (probe().kind, probe().has_cuda_ext, probe().detail) == ("amp", False, "")


# --- the sentences


@pytest.mark.spec("PMB-15")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (PYRAMID, r"The package 'apex' at .*apex \(installed by apex 0\.9\.10\.dev0\) is not NVIDIA's apex\."),
        (nvidias(amp=None), r"NVIDIA's apex at .*apex \(installed by apex 0\.1\) no longer has amp\."),
        (OLD, r"has amp, but its import fails here: ModuleNotFoundError: .*torch\._six.*older than 2023-02-15"),
    ],
    ids=["not-nvidia", "no-amp", "broken"],
)
def test_the_wrong_apex_is_named_before_any_work_begins(
    files: dict[str, str], message: str, install: Install, tmp_path: Path
) -> None:
    install(files)
    module = Classifier()
    module.get_train_dataloader = lambda *_: pytest.fail("data was asked for")  # type: ignore[method-assign]
    trainer = ts.Trainer(module, arguments(tmp_path, backend="sp-amp-apex"))

    with pytest.raises(ts.ApexUnavailableError, match=message) as caught:
        trainer.train()
    for part in ("2025-05-08", "e13873d", "tag 25.05", "backend='sp-amp'"):
        assert part in str(caught.value)
    assert isinstance(caught.value, ts.ConfigurationError)


def test_the_error_for_a_missing_apex_mentions_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)  # type: ignore[arg-type]

    with pytest.raises(ts.ApexUnavailableError, match="'pip install apex' installs another package"):
        ts.build_trainer_backend("sp-amp-apex").open("cpu")


def test_the_cpu_is_refused(install: Install) -> None:
    install(WORKS)

    with pytest.raises(ts.ConfigurationError, match=r"on device 'cpu': apex\.amp trains on CUDA devices only"):
        ts.build_trainer_backend("sp-amp-apex").open("cpu")


def test_a_model_on_the_cpu_is_refused_without_open_too(install: Install) -> None:
    install(WORKS)
    world = ts.build_trainer_backend("sp").open("cpu")
    work = Workload.from_module(Classifier(), [], world)

    with pytest.raises(ts.ConfigurationError, match=r"on device 'cpu': apex\.amp trains on CUDA devices only"):
        ts.build_trainer_backend("sp-amp-apex").prepare(work)


def test_nothing_of_apex_is_imported_to_build_or_explain(install: Install) -> None:
    install(nvidias(NEVER_RUN, NEVER_RUN))
    stack = ts.build_trainer_backend("sp-amp-apex", amp_apex={"opt_level": "O2"})

    assert "clip amp-apex > sp" in " ".join(stack.explain().split())
    assert stack.spec == "sp-amp-apex"
    assert "apex" not in sys.modules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "02"}, "opt_level='02': write one of 'O0', 'O1', 'O2', 'O3'"),
        ({"loss_scal": 1.0}, "no option 'loss_scal'. Did you mean 'loss_scale'?"),
        ({"enabled": False}, "enabled is set by the trainer: write a backend without 'amp-apex'"),
        ({"num_losses": 2}, "num_losses is set by the trainer: a step has one loss."),
        ({"cast_model_type": torch.bfloat16}, "apex.amp knows float16 only. Write 'bf16'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ts.ConfigurationError) as caught:
        ts.build_trainer_backend("sp-amp-apex", amp_apex=options)

    assert message in str(caught.value)


def test_contradictory_options_are_refused() -> None:
    with pytest.raises(ts.BackendSpecError, match="fill the same slot"):
        ts.build_trainer_backend("sp-bf16-amp-apex")
    options = {"amp_apex": {"opt_level": "O1"}}
    with pytest.raises(ts.ConfigurationError, match="contradict each other"):
        ts.TrainerArguments(backend="sp-amp-apex", amp_level_apex="O2", backend_options=options)
    with pytest.raises(ts.ConfigurationError, match="has no apex layer"):
        ts.TrainerArguments(backend="sp-amp", amp_level_apex="O2")


@pytest.mark.spec("PMT-04")
def test_the_argument_of_pymarlin_reaches_the_layer(tmp_path: Path) -> None:
    args = arguments(tmp_path, backend="sp-amp-apex", amp_backend_apex=True, amp_level_apex="O2")
    trainer = ts.Trainer(Classifier(), args)

    assert trainer.trainer_backend.get_state() == {"amp-apex": {"opt_level": "O2"}}


# --- apex's own code, in a separate process


LEVELS: dict[str, dict[str, Any]] = {
    "O0": {},
    "O1": {},
    "O2": {"max_loss_scale": 2.0**15},  # the modules of these tests compute their loss in float16
    "O3": {},
}


CONTRACT = ["tests/contract"]
OTHERS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("backends", "trainer")
    for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
    if "\nfrom tests.helpers.specs import" in path.read_text(encoding="utf-8")  # this file has no such line
]
"""Files with tests that run through every stack."""


@pytest.fixture(scope="session")
def wheel() -> Path:
    place = ROOT / ".cache" / f"apex-{SHA256[:12]}"
    problem = get_wheel(place)
    if problem:
        pytest.skip(problem)
    return place


def with_apex(wheel: Path, level: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "PYTHONPATH": str(Path(ts.__file__).parents[1]),
        "TRAINSTACK_TEST_APEX": str(wheel),
        "TRAINSTACK_TEST_APEX_OPTIONS": json.dumps({"opt_level": level, **LEVELS[level]}),
    }
    command = (sys.executable, "-m", *command)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=patience(60)
    )


@pytest.mark.processes
@pytest.mark.spec("PMB-15", "PMB-12", "F110", "F410")
@pytest.mark.parametrize(
    ("level", "suites"),
    [
        pytest.param("O0", CONTRACT, marks=pytest.mark.long),
        pytest.param("O1", [*CONTRACT, *OTHERS], marks=pytest.mark.long),
        ("O2", CONTRACT),
        pytest.param("O3", [], marks=pytest.mark.long),
        pytest.param("O0", OTHERS, marks=pytest.mark.long),
    ],
    ids=["O0", "O1", "O2", "O3", "O0, the other files"],
)
def test_the_layer_fulfils_its_contract_on_apex_itself(level: str, suites: list[str], wheel: Path) -> None:
    """The contract of every stack of one process, and `apex_checks`. O3 has only these: AdamW fails in float16."""
    command = ["pytest", "-p", "tests.helpers.apex_plugin", "-p", "no:cacheprovider", "-q", "-k", "apex and not ddp"]
    done = with_apex(wheel, level, *command, "tests/helpers/apex_checks.py", *suites)

    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(done.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= (27 if suites else 13), done.stdout


@pytest.mark.processes
@pytest.mark.spec("F109", "FN-32")
@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.long), "O2"])
def test_a_new_process_continues_exactly_from_every_step(level: str, wheel: Path, tmp_path: Path) -> None:
    """O2 has the state of O1 (the loss scaler's) and float32 copies of the weights."""
    results: dict[str, str] = {}
    for what in ("unbroken", "resumed"):
        done = with_apex(wheel, level, "tests.helpers.apex_run", what, str(tmp_path))
        assert done.returncode == 0, done.stderr
        results |= json.loads(done.stdout.splitlines()[-1])

    assert len(results) >= 20
    assert set(results.values()) == {results["unbroken"]}
