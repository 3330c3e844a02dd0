"""Where stored checkpoints come from, who signed them, and whether their bytes are still the same."""
