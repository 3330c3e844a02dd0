"""A test whether a few training steps give the same bits twice, with the causes if they do not."""
