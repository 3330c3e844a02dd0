"""Which package called `apex` is installed here: found out by looking at its files, before anything of it is run."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from trainstack.errors import ApexUnavailableError

Kind = Literal["absent", "not-nvidia", "broken", "no-amp", "amp"]

_MARKS_OF_NVIDIA = ("multi_tensor_apply", "normalization")
"""Folders that every version of NVIDIA's apex has had, and the web framework of the same name has not."""

_ADVICE = (
    "apex.amp was taken out of NVIDIA's apex on 2025-05-08; the last commit with it is e13873d of 2025-04-11 (tag "
    "25.05). Install that one, or write 'amp' in place of 'amp-apex' (backend='sp-amp', or 'ddp-amp' over processes): "
    "float16 by torch itself, which needs no other package."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApexInfo:
    """What `probe` found.

    Attributes:
        kind: `"absent"`; `"not-nvidia"`, another package of that name; `"broken"`, NVIDIA's with amp, which does not
            import here; `"no-amp"`, NVIDIA's from which amp was taken out; `"amp"`, one that works.
        location: the folder or file; None if absent.
        distribution: what installed it, with its version, e.g. `"apex 0.1"`; None if nothing says so.
        has_cuda_ext: whether apex's compiled kernels (`amp_C`) are there.
        detail: what else there is to say: the error of the import, or what is odd about the place.
    """

    kind: Kind
    location: str | None = None
    distribution: str | None = None
    has_cuda_ext: bool = False
    detail: str = ""


def probe() -> ApexInfo:
    """Look for apex. Its code is run only if its files say that it is NVIDIA's and has amp."""
    place = _place()
    if place is None:
        return ApexInfo(kind="absent")
    found = partial(
        ApexInfo, location=str(place), distribution=_distribution(), has_cuda_ext=find_spec("amp_C") is not None
    )
    if not all((place / part).is_dir() for part in _MARKS_OF_NVIDIA):
        return found(kind="not-nvidia", detail=_what_else(place))
    if not (place / "amp" / "frontend.py").is_file():
        return found(kind="no-amp")
    problem = _import_problem()
    return found(kind="broken", detail=problem) if problem else found(kind="amp")


def require_amp() -> Any:
    """The module `apex.amp`.

    Raises:
        ApexUnavailableError: there is none that works; says what was found, where, and what to write instead.
    """
    if {"apex", "apex.amp"} <= set(sys.modules):  # imported once, by the probe or by the user
        return sys.modules["apex.amp"]
    info = probe()
    if info.kind != "amp":
        raise ApexUnavailableError(f"backend 'amp-apex' needs apex.amp. {_describe(info)} {_ADVICE}")
    return importlib.import_module("apex.amp")


def _describe(info: ApexInfo) -> str:
    where = f"{info.location} (installed by {info.distribution or 'no distribution that pip knows'})"
    if info.kind == "absent":
        return "No package 'apex' is installed here; the one that 'pip install apex' fetches is not NVIDIA's."
    if info.kind == "not-nvidia":
        return f"What is installed as 'apex' at {where} is not NVIDIA's apex{info.detail}."
    if info.kind == "no-amp":
        return f"NVIDIA's apex at {where} has no amp any more."
    return f"NVIDIA's apex at {where} has amp, but does not import here: {info.detail}."


def _place() -> Path | None:
    """The folder of the package, or the file of a module."""
    try:
        spec = find_spec("apex")
    except ValueError:  # it is in sys.modules, put there by hand
        origin = getattr(sys.modules["apex"], "__file__", None)
        return Path(origin or "sys.modules['apex']")
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else spec.origin or "apex")


def _distribution() -> str | None:
    names = sorted(set(metadata.packages_distributions().get("apex", ())))
    return ", ".join(f"{name} {metadata.version(name)}" for name in names) or None


def _what_else(place: Path) -> str:
    if (place / "apex" / "multi_tensor_apply").is_dir():
        return ", but a folder that holds its source. Install it from there, or start in another folder"
    return ""


def _import_problem() -> str:
    """The error that importing apex.amp ends in; empty if there is none."""
    try:
        importlib.import_module("apex.amp")
    except Exception as error:
        old = " (this apex is older than 2023-02-15, when it stopped to use torch._six)" if "_six" in str(error) else ""
        return f"{type(error).__name__}: {str(error).rstrip('.')}{old}"
    return ""
