"""A run of training: the loop, its start, its end and its stops."""
