"""Damaged and incomplete checkpoints."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import torch
from torch import Tensor

from tools.conformance.adapter import Adapter, NotOfferedError, Verdict
from tools.conformance.case import case, describe, passed, wrong
from tools.conformance.saved import break_off, files_of, loaded
from tools.conformance.task import make_task


@case("torn checkpoint")
def torn(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """The largest file of the newest checkpoint, of step 4, was cut in half: the run continues from that of step 3."""
    break_off(adapter, folder / "run", steps=4)
    largest = max(files_of(adapter.newest(folder / "run")), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    task = make_task(folder / "run", save=True, resume="newest")
    try:
        adapter.train(task)
    except NotOfferedError:
        raise
    except Exception as error:
        return wrong(f"cannot continue, although an intact one exists: {describe(error)}")
    if len(task.rates) == 2:
        return wrong(f"continues from it, although {largest.name} is cut")
    return passed() if len(task.rates) == 3 else wrong(f"takes {len(task.rates)} more steps instead of 3")


@case("corrupted checkpoint")
def corrupted(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """One bit of a weight in a checkpoint has flipped on the disk: the run does not continue from it."""
    break_off(adapter, folder / "run", steps=4)
    newest = adapter.checkpoints(folder / "run")[-1]
    whole = loaded(adapter, newest, folder / "whole")
    flipped = _flip_a_bit(newest, whole)
    if not flipped:
        return Verdict("n.a.", "weights do not lie in its checkpoints as they are")
    try:
        again = loaded(adapter, newest, folder / "again")
    except Exception:
        return passed()
    return passed() if torch.equal(whole, again) else wrong(f"continues from the wrong weights in {flipped}")


def _flip_a_bit(checkpoint: Path, weights: Tensor) -> str:
    """Flip the lowest exponent bit of a weight in each file that has it; returns the names of the files."""
    weight = weights[:16].numpy().tobytes()
    flipped = []
    for file in files_of(checkpoint):
        data = bytearray(file.read_bytes())
        at = data.find(weight)
        if at >= 0:
            data[at + 6] ^= 0x10
            file.write_bytes(data)
            flipped.append(file.name)
    return ", ".join(flipped)


class _Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@case("pickle bomb")
def bomb(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """Each file of a checkpoint in turn is a pickle that runs code: resuming from the checkpoint does not run it."""
    break_off(adapter, folder / "run", steps=2)
    newest = adapter.checkpoints(folder / "run")[-1]
    trace = folder / "exploded"
    for file in files_of(newest):
        whole = file.read_bytes()
        for bomb in (pickle.dumps(_Bomb(trace)), _in_torch_format(_Bomb(trace))):
            file.write_bytes(bomb)
            try:
                adapter.train(make_task(folder / "again", resume=newest))
            except NotOfferedError:
                raise
            except Exception:  # it refuses
                pass
            if trace.exists():
                return wrong(f"code in {file.name if newest.is_dir() else 'the checkpoint'} was run")
        file.write_bytes(whole)
    return passed()


def _in_torch_format(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
