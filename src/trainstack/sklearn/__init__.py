"""Estimators for scikit-learn; needs the extra `sklearn`."""

from trainstack.sklearn.estimators import TrainstackClassifier, TrainstackRegressor

__all__ = ["TrainstackClassifier", "TrainstackRegressor"]
