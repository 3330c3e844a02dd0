"""Public training scripts end with the same bits as a plain loop and as a port."""

from __future__ import annotations

import pytest
import torch

from tools.field_scripts import __main__ as field_scripts

FAST = ("vae", "mnist_forward_forward", "word_language_model")


def test_some_ports_have_the_bits_of_their_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert field_scripts.main(list(FAST)) == 0
    assert capsys.readouterr().out.count("equal bits") == len(FAST)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.filterwarnings("default")  # of transformers
def test_all_ports_have_the_bits_of_their_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert field_scripts.main([]) == 0
    assert capsys.readouterr().out.count("equal bits") == len(field_scripts.SCRIPTS)


def test_a_port_that_differs_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    vae = field_scripts.script("vae")
    monkeypatch.setattr(
        vae.Vae, "on_end_train_epoch", lambda self, global_step: setattr(self, "sample", torch.zeros(4, 784))
    )
    assert field_scripts.main(["vae"]) == 1
    assert "equal bits" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [(1.0, 1.0, 0.0), (1.0, 1.5, 0.5), (float("nan"), 1.0, float("inf")), (float("nan"), float("nan"), float("inf"))],
)
def test_a_difference_of_nan_is_infinite(one: float, other: float, difference: float) -> None:
    assert field_scripts.largest_difference([torch.tensor([one])], [torch.tensor([other])]) == difference
