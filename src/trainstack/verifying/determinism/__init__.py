"""Whether a few training steps give the same bits twice, and what prevents it."""
