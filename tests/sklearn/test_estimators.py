"""The estimators for scikit-learn."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from trainstack.errors import ConfigurationError

sklearn = pytest.importorskip("sklearn", minversion="1.6")
from sklearn.base import clone  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from trainstack.sklearn import TrainstackClassifier, TrainstackRegressor  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
LABELS = np.where(X[:, 0] + X[:, 1] > 0, "yes", "no")


@pytest.mark.slow
@pytest.mark.parametrize("made_by", [TrainstackClassifier, pytest.param(TrainstackRegressor, marks=pytest.mark.long)])
def test_the_checks_of_sklearn_pass(made_by: Any) -> None:
    """All checks apply. scikit-learn skips the check of array API input by default."""
    results = check_estimator(made_by(), on_skip=None)
    assert {one["status"] for one in results} <= {"passed", "skipped"}
    assert [one["check_name"] for one in results if one["status"] == "skipped"] == ["check_array_api_input"]


def test_a_classifier_learns_and_can_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fitted = TrainstackClassifier(random_state=0, epochs=20).fit(X, LABELS)
    assert fitted.score(X, LABELS) > 0.9
    assert fitted.n_iter_ == 20
    probabilities = fitted.predict_proba(X)
    assert np.allclose(probabilities.sum(1), 1)
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(X), probabilities)
    assert np.array_equal(clone(fitted).fit(X, LABELS).predict_proba(X), probabilities)
    assert not list(tmp_path.iterdir()), "a fit wrote files"


def linear(features: int, outputs: int) -> nn.Module:
    return nn.Linear(features, outputs)


def test_a_grid_search_over_a_pipeline_finds_better_epochs() -> None:
    pipeline = make_pipeline(StandardScaler(), TrainstackClassifier(linear, random_state=0))
    grid = {"trainstackclassifier__epochs": [1, 40]}
    assert GridSearchCV(pipeline, grid, cv=2).fit(X, LABELS).best_params_ == {"trainstackclassifier__epochs": 40}


def test_a_regressor_predicts_on_the_scale_of_its_targets() -> None:
    targets = np.stack([1000 + 10 * X[:, 0], X[:, 1]], 1)
    fitted = TrainstackRegressor(linear, random_state=0, epochs=120, trainer_args={"clip_grads": False}).fit(X, targets)
    assert fitted.predict(X).shape == targets.shape
    assert fitted.score(X, targets) > 0.9
    assert TrainstackRegressor(linear, random_state=0).fit(X, targets[:, 1]).predict(X).shape == (60,)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="one class"):
        TrainstackClassifier().fit(X, ["a"] * 60)
    with pytest.raises(ConfigurationError, match="returned a str"):
        TrainstackClassifier(lambda features, classes: "network").fit(X, LABELS)
    with pytest.raises(ConfigurationError, match="Write epochs"):
        TrainstackClassifier(trainer_args={"max_epochs": 3}).fit(X, LABELS)
    with pytest.raises(ConfigurationError, match=r"maps 2 rows to outputs of shape \(2,\), but \(2, 1\) is needed"):
        TrainstackRegressor(lambda features, _: nn.Sequential(nn.Linear(features, 1), nn.Flatten(0))).fit(X, X[:, 0])
    with pytest.raises(ConfigurationError, match="Let its last layer have 2 outputs"):
        TrainstackClassifier(lambda features, _: nn.Linear(features, 5)).fit(X, LABELS)
    with pytest.raises(ValueError, match="beyond float64"):
        TrainstackRegressor().fit(X, X[:, 0] * 1e200)
