"""One file for each trainer."""
