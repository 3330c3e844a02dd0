"""The table of published results: its features, its normalization, and short runs of all rows."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tools.dp_table import __main__ as table
from tools.dp_table.features import private_statistics
from tools.dp_table.images import digits
from tools.dp_table.rows import ROWS, build
from tools.dp_table.scattering import CHANNELS, Scattering
from tools.dp_table.training import DELTA
from trainstack.backends.dp import SpendLedger, epsilon_of

SHORT = ["dp_table", "--smoke", "--runs", "1"]


def test_features_depend_on_directions_and_not_on_small_shifts() -> None:
    image = torch.zeros(3, 28, 28)
    image[0, 10:18, 13:15] = 1.0  # a vertical bar
    image[1, 10:18, 14:16] = 1.0  # one pixel to the right
    image[2, 13:15, 10:18] = 1.0  # a horizontal bar
    features = Scattering()(image)
    assert features.shape == (3, CHANNELS, 7, 7)
    bar, shifted, turned = features[:, 1:17].mean(dim=(2, 3))  # the first order, 8 directions of 2 scales
    assert torch.allclose(bar, shifted, rtol=0.05)
    across = bar.view(2, 8)
    assert torch.allclose(across.roll(4, dims=1), turned.view(2, 8), rtol=0.1, atol=1e-3), "a turn by 90 degrees"
    assert int(across[0].argmax()) != int(turned.view(2, 8)[0].argmax())


def test_constant_images_have_no_wavelet_coefficients() -> None:
    features = Scattering()(torch.full((1, 28, 28), 0.7))
    assert torch.allclose(features[:, 0], torch.tensor(0.7), atol=1e-4)
    assert float(features[:, 1:].abs().max()) < 1e-4


def test_statistics_are_noisy_moments_and_kept_by_resumed_runs(tmp_path: Path) -> None:
    features = Scattering()(digits().train[:100].float() / 255).numpy()
    ledger = SpendLedger(tmp_path / "privacy-ledger.jsonl")
    mean, variance = private_statistics(features, 1e-9, tmp_path / "none.npz", SpendLedger(tmp_path / "other.jsonl"))
    assert np.abs(mean - features.mean(axis=(0, 2, 3))).max() < 0.02  # half of the records are clipped
    assert (variance >= 0).all()

    first = private_statistics(features, 8.0, tmp_path / "noisy.npz", ledger)
    again = private_statistics(features, 8.0, tmp_path / "noisy.npz", ledger)
    assert ledger.spent() == [(8.0, 1.0, 2)]
    other = private_statistics(features, 8.0, tmp_path / "other.npz", ledger)
    assert ledger.spent() == [(8.0, 1.0, 4)]
    assert np.array_equal(first, again), "drawing them twice would cost privacy twice"
    assert not np.array_equal(first[0], other[0])
    spread = np.std(first[0] - mean) / np.std(other[0] - mean)
    assert 0.6 < spread < 1.6


def test_the_numbers_of_the_rows_give_the_published_epsilons() -> None:
    parameters = {row.name: sum(p.numel() for p in build(row.architecture).parameters()) for row in ROWS.values()}
    assert parameters == {"scatternet-linear": 39_700, "cnn": 26_010, "opacus": 26_010}
    for row in ROWS.values():
        releases = [(row.noise_multiplier, row.batch / 60_000, row.steps)]
        releases += [] if row.normalization_noise is None else [(row.normalization_noise, 1.0, 2)]
        # Both used the conversion of Mironov 2017, which states about 15 % more than that of Canonne et al. 2020.
        assert 0.8 < epsilon_of(releases, DELTA, "rdp") / row.published_epsilon < 0.9


@pytest.mark.long
def test_the_short_form_trains_each_row_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "--output-dir", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    with mock.patch("sys.argv", words):
        table.main()
        first = capsys.readouterr().out
        table.main()
    again = capsys.readouterr().out
    assert [line.split(",")[0] for line in first.splitlines()[:3]] == list(ROWS)
    assert again.splitlines() == first.splitlines()[3:], "finished rows are not trained again"
    assert sum(line.startswith("| ") and "| 1 |" in line for line in again.splitlines()) == 3
    ledger = SpendLedger(tmp_path / "out" / "scatternet-linear" / "run-1" / "privacy-ledger.jsonl")
    assert (8.0, 1.0, 2) in ledger.spent()
    assert ledger.runs()["normalization"] == 2
