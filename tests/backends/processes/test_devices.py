"""The device of a process, and the string that `auto` stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, train
from tests.helpers.processes import run_world
from tests.helpers.workers import collectives
from trainstack.backends.processes.world import pick_device


@contextmanager
def gpus(count: int) -> Iterator[None]:
    names = {"current_accelerator": torch.device("cuda"), "is_available": True, "device_count": count}
    with mock.patch.multiple(torch.accelerator, **{n: lambda v=v: v for n, v in names.items()}):
        yield


class TestDevices:
    @pytest.fixture
    def four_gpus(self) -> Any:
        with gpus(4):
            yield

    @pytest.mark.spec("FN-05")
    @pytest.mark.parametrize(
        ("wanted", "place", "device"),
        [
            ("cuda:1", (0, 1), "cuda:1"),
            (torch.device("cuda", 2), (0, 1), "cuda:2"),
            (3, (0, 1), "cuda:3"),
            (-1, (2, 4), "cuda:2"),
            ([3, 1], (0, 2), "cuda:3"),
            ([3, 1], (1, 2), "cuda:1"),
            (["cuda:0", "cpu"], (1, None), "cpu"),
            ([2], (0, 1), "cuda:2"),
            ("auto", (1, 2), "cuda:1"),
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("four_gpus")
    def test_they_are_named_in_every_usual_way(self, wanted: Any, place: tuple[int, int | None], device: str) -> None:
        assert pick_device(wanted, *place) == torch.device(device)

    @pytest.mark.usefixtures("four_gpus")
    def test_there_are_as_many_as_processes(self) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"device=\[0, 1\] names 2 devices, for 1 processes.*nproc=2"):
            pick_device([0, 1])
        with pytest.raises(ts.ConfigurationError, match=r"names 4 devices, for 1 processes"):
            pick_device(-1)
        with pytest.raises(ts.ConfigurationError, match=r"device=4: torch finds 4 accelerators"):
            pick_device(4)

    @pytest.mark.parametrize("wanted", ["cuda:7", torch.device("cuda", 7), 7, ["cuda:7"]], ids=str)
    @pytest.mark.usefixtures("four_gpus")
    def test_a_missing_device_is_refused_in_every_notation(self, wanted: Any) -> None:
        with pytest.raises(ts.ConfigurationError, match=r"device=('cuda:)?7'?: torch finds 4 accelerators"):
            pick_device(wanted)

    def test_an_unknown_kind_gets_the_message_of_the_arguments(self) -> None:
        for check in (pick_device, lambda device: ts.TrainerArguments(device=device)):
            with pytest.raises(ts.ConfigurationError, match="device='tpux': torch has no such device; write 'auto'"):
                check("tpux")

    @pytest.mark.parametrize("wanted", ["auto", "cuda"])
    @pytest.mark.parametrize("rank", [0, 3])
    def test_more_processes_than_devices_are_refused_on_each_of_them(
        self, wanted: str, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with gpus(2), pytest.raises(ts.ConfigurationError, match=rf"device='{wanted}': 4 processes .* 2 accelerators"):
            pick_device(wanted, rank, 4)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        with gpus(1), pytest.raises(ts.ConfigurationError, match=r"4 processes .* 1 accelerators"):
            pick_device(wanted, rank, 4)
        with gpus(2), pytest.raises(ts.ConfigurationError, match=r"at least 3 processes .* 2 accelerators"):
            pick_device(wanted, 2, None)

    @pytest.mark.parametrize("wanted", ["auto", "cuda", -1, 0, "cuda:0"])
    @pytest.mark.parametrize("rank", [0, 3])
    def test_a_process_that_sees_its_own_device_alone_takes_it(
        self, wanted: Any, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        with gpus(1):
            assert pick_device(wanted, rank, 4) == torch.device("cuda:0")

    def test_a_number_without_an_accelerator_is_refused(self) -> None:
        if torch.accelerator.is_available():
            pytest.skip("there is one")
        for wanted in (0, -1):
            with pytest.raises(ts.ConfigurationError, match=rf"device={wanted}: torch finds 0 accelerators"):
                pick_device(wanted)

    @pytest.mark.parametrize("wrong", [[], True, [None], 1.5])
    def test_an_unknown_device_is_refused(self, wrong: Any) -> None:
        with pytest.raises(ts.ConfigurationError, match="device="):
            ts.TrainerArguments(device=wrong)

    def test_a_run_takes_the_one_of_its_process(self, tmp_path: Path) -> None:
        assert train(Classifier(), tmp_path, device=["cpu"]).device == torch.device("cpu")
        with pytest.raises(ts.ConfigurationError, match="names 2 devices"):
            train(Classifier(), tmp_path, device=["cpu", "cpu"])


class TestChoosingTheBackend:
    @pytest.mark.spec("FN-02")
    @pytest.mark.parametrize(("environ", "process"), [({}, "sp"), ({"RANK": "0", "WORLD_SIZE": "2"}, "ddp")])
    def test_auto_follows_the_launcher_of_the_process(
        self, environ: dict[str, str], process: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"} if environ else {}
        for name, value in (environ | place).items():
            monkeypatch.setenv(name, value)
        assert ts.TrainerArguments(backend="auto-bf16").backend == "auto-bf16"
        assert ts.build_trainer_backend("auto-bf16").spec == f"{process}-bf16"
        assert ts.build_trainer_backend("auto").spec == process

    def test_options_are_given_to_the_layers_that_it_stands_for(self, tmp_path: Path) -> None:
        trainer = train(Classifier(), tmp_path, backend="auto-amp", backend_options={"amp": {"init_scale": 2.0}})
        assert trainer.trainer_backend.spec == "sp-amp"
        with pytest.raises(ts.BackendSpecError, match="'bf16-auto'"):
            ts.TrainerArguments(backend="bf16-auto")


@pytest.mark.distributed
def test_each_rank_of_ddp_selects_its_device() -> None:
    ranks = run_world(2, collectives.selected)
    assert ranks == [{"device": f"cuda:{rank}", "open": rank, "joined": [rank], "closed": 0} for rank in range(2)]
