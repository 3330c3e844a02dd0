"""The tests of a trainer: each file has a small group of cases."""
