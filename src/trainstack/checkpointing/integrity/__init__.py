"""The origin of stored checkpoints, their signatures, and repeated comparison of their bytes with the hashes."""
