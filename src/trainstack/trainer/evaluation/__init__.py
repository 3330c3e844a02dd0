"""Validation, test and prediction passes."""
