"""Processes that run one function after the other as the ranks of a world: for tests and for tools."""
