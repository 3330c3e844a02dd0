"""One run: the loop, its start, its end and its stops."""
