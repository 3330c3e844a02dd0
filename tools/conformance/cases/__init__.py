"""The tests of a trainer: a small group of cases a file."""
