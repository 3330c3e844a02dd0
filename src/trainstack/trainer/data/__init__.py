"""Training data: the order and the loading of samples."""
