"""Functions of the ranks of `test_wire.py` and `test_exchanges.py`."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.workers import RANK
from trainstack.backends.processes import wire

LIMIT_S = {"ddp": {"timeout_s": 3.0}}


@dataclass
class Answer:
    """An output of a step."""

    text: str
    score: torch.Tensor


class Span(NamedTuple):
    """Another one."""

    begin: int
    end: int


class Leaves:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def error_of(function: Any) -> str:
    """The error of `function`, as text."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def values() -> Any:
    """Values that ranks exchange: short, long, of different lengths, refused, and sums."""
    stack = ts.build_trainer_backend("ddp")
    comm = stack.open("cpu").comm
    size = comm.size
    state = {"big": torch.arange(40_000.0).reshape(200, 200), "texts": ["ä"] * 20, "bits": torch.ones(3).bfloat16()}
    state |= {"tied": state["big"]}
    received = comm.broadcast_object(state if RANK == 0 else None, "a state")
    uneven = comm.gather(torch.full((RANK * 300_000,), RANK, dtype=torch.int16), "uneven")
    parts = [1e16, 1.0, -1e16, 0.5][RANK : RANK + 1]
    sums = [comm.sum([*parts, 0.1 * RANK], "sums") for _ in range(3)]
    said = [error_of(lambda: comm.gather({"day": [date.min] if RANK == 1 else []}, "days"))]
    said.append(error_of(lambda: comm.broadcast_object(date.min, "a day")))
    said.append(error_of(lambda: comm.sum([1.0] * 50 * RANK, "numbers")))
    said.append(error_of(lambda: comm.gather_to_main([date.min] if RANK == 1 else [], "a save")))
    result = {
        "state": torch.equal(received["big"], state["big"]) and received["texts"] == state["texts"],
        "tied": received["tied"] is received["big"],
        "bits": str(received["bits"].dtype),
        "writeable": bool((received["big"] + 1).sum() and received["big"].add_(1).sum()),
        "uneven": [[part.numel(), str(part.dtype), int(part.sum())] for part in uneven],
        "long": [len(text) for text in comm.gather("x" * 1000 * RANK)],
        "sums": [[value.hex() for value in one] for one in sums],
        "said": said,
        "objects": [type(value).__name__ for value in comm.gather(Span(1, RANK) if RANK else None, "spans")],
        "size": size,
    }
    stack.close()
    return result


def apart() -> list[str]:
    """The error of each rank where ranks are in different exchanges, one kind after the other."""
    stack = ts.build_trainer_backend("ddp")
    comm = stack.open("cpu").comm

    def in_a_hook() -> None:
        comm.gather(torch.ones(1), "trainer.gather")

    cases = [
        (lambda: comm.gather(0, "the losses of a log point"), in_a_hook),
        (lambda: comm.sum([1.0], "batch_weight"), lambda: comm.broadcast_object({}, "loading")),
        (lambda: comm.check_place("beginning an evaluation"), lambda: comm.raise_if_any(None, "saving")),
        (lambda: comm.gather("x" * 3000, "much"), lambda: comm.gather("", "little")),
        (lambda: comm.gather(date.min, "refused"), lambda: comm.gather("", "little")),
        (lambda: comm.gather(0, "the same name"), lambda: comm.broadcast_object(0, "the same name")),
    ]
    with comm.fail_together(lambda: "global step 50"):
        said = [error_of(pair[min(RANK, 1)]) for pair in cases]
    assert comm.gather(RANK) == list(range(comm.size))  # and the group is whole
    stack.close()
    return said


def extra_gather(log_every: int) -> str:
    """In a training, one rank calls `trainer.gather` once more than the others."""

    class Extra(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if RANK == 1 and global_step == 3:
                trainer.gather(torch.zeros(1))

    made: dict[str, Any] = {"log_every": log_every, "backend_options": LIMIT_S}
    trainer = ts.Trainer(Extra(), arguments("unused", backend="ddp", **made))
    return error_of(trainer.train)


def alone_in(call: str, directory: str) -> str:
    """In a training, one rank calls a method that all have to call."""

    class Alone(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(64), validate=True)
            self.norm = nn.BatchNorm1d(6)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return nn.functional.cross_entropy(self.net(self.norm(batch[0])), batch[1])

        def on_end_train_step(self, global_step: int) -> None:
            if RANK == 1 and global_step == 3:
                getattr(trainer, call)()

    made: dict[str, Any] = {"backend_options": LIMIT_S, "checkpointer_args": ts.DefaultCheckpointerArguments()}
    trainer = ts.Trainer(Alone(), arguments(directory, backend="ddp", **made))
    return error_of(trainer.train)


def hostile(path: str) -> str:
    """Rank 1 sends pickles that leave a file where they are read: in place of a message, and inside of one."""
    stack = ts.build_trainer_backend("ddp")
    comm = stack.open("cpu").comm
    said, bomb = [], pickle.dumps(Leaves(path))
    inside = wire.encode(Leaves(path), allow_pickle=True)
    for message in (bomb, inside.head):
        fake = mock.Mock(head=message, blobs=[], classes={}, packed=lambda message=message: message)
        with mock.patch.object(wire, "encode", return_value=fake) if RANK == 1 else mock.MagicMock():
            said.append(error_of(lambda: comm.gather(None, "a gather")))
    stack.close()
    return "\n".join(said)


def objects(allow_pickle: bool, samples: int = 3) -> Any:
    """Outputs and metric inputs that are objects of the user's; some ranks have none."""

    class Days:
        """Counts days."""

        def update(self, days: list[date]) -> None:
            self.days += days

        def compute(self) -> float:
            return float(len(self.days))

        def reset(self) -> None:
            self.days: list[date] = []

    class Talks(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            outputs: dict[str, Any] = {
                "answer": Answer("a", batch[0].mean(1)),
                "all": [Answer("b", row) for row in batch[0]],
            }
            if allow_pickle:
                outputs["days"] = [date.min] * len(batch[1])
            return outputs

        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            return {"days": [date.min] * len(batch[1])}

    options = {"ddp": {"allow_pickle": allow_pickle}}
    module = Talks(numbers(samples), validate=True)
    metrics = {"days": Days()} if allow_pickle else {}
    made: dict[str, Any] = {"val_batch_size": 1, "backend_options": options}
    trainer = ts.Trainer(module, arguments("unused", backend="ddp", **made), metrics=metrics)
    outputs = trainer.validate(keep_outputs=True)
    got = outputs["default"]
    if allow_pickle:
        return {"days": sum(map(len, got["days"])), "metric": outputs.metrics["val/days"]}
    refused = error_of(lambda: trainer.gather({"days": [date.min]}))
    return {
        "answers": [[answer.text, len(answer.score), type(answer).__name__] for answer in got["answer"]],
        "all": [answer.text for answers in got["all"] for answer in answers],
        "spans": [
            [type(span).__name__, *span] for span in trainer.gather({"spans": [Span(1, 2)] * (RANK + 1)})["spans"]
        ],
        "refused": refused,
    }


def collectives(case: str) -> dict[str, int]:
    """The exchanges that Python starts in a run of 40 steps, without buckets: collectives, messages, pickles."""
    counts: dict[str, int] = {"objects": 0}

    def counted(owner: Any, name: str, key: str) -> Any:
        called = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[key] = counts.get(key, 0) + 1
            return called(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    module = Classifier(numbers(8 * 40), validate="validation" in case)
    if "weight" in case:
        module.batch_weight = lambda batch: float(batch[1].sum())  # type: ignore[method-assign]
    if "norm" in case:
        module.net.insert(0, nn.BatchNorm1d(6))
    made: dict[str, Any] = {
        "log_every": 1 if "log" in case else 100,
        "gpu_batch_size_limit": 1 if "accumulated" in case else 4,
    }
    trainer = ts.Trainer(module, arguments("unused", backend="ddp", **made))
    names = ("allreduce", "allgather", "broadcast", "barrier", "gather", "scatter", "send")
    pickled = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    patches = [counted(dist.ProcessGroup, name, name) for name in names] + [
        counted(dist, name, "objects") for name in pickled
    ]
    for patch in patches:
        patch.start()
    try:
        trainer.train()
    finally:
        mock.patch.stopall()
    return counts


DTYPES = (
    *(
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
    ),
    *("float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
)


def buffers() -> Any:
    """Buffers and frozen parameters of each dtype: unlike at first, and written to differently in each step."""

    class Many(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(24), validate=True)
            for name in DTYPES:
                values = torch.tensor([[1, 2, 0], [2, 1, 1]]).roll(RANK).to(torch.float32).to(getattr(torch, name))
                self.register_buffer(f"buffer_{name}", values.T)
                self.register_parameter(f"frozen_{name}", nn.Parameter(values.clone(), requires_grad=False))
            self.register_buffer("steps", torch.zeros((), dtype=torch.uint16))
            self.register_buffer("nothing", torch.zeros(0, 3, dtype=torch.int16))
            self.at_begin: list[int] = []

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.at_begin.append(int(self.steps))
            self.steps = (self.steps.int() + 1 + RANK).to(torch.uint16)  # replaced, and different
            return super().train_step(global_step, batch, device)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.validated_with = int(self.steps)
            return super().val_step(global_step, batch, device)

    module = Many()
    trainer = ts.Trainer(module, arguments("unused", backend="ddp"))
    trainer.train()
    kept = {f"{kind}_{name}": getattr(module, f"{kind}_{name}") for name in DTYPES for kind in ("buffer", "frozen")}
    return {
        "values": {name: value.detach().contiguous().view(torch.uint8).tolist() for name, value in kept.items()},
        "at_begin": module.at_begin,
        "validated_with": module.validated_with,
    }
