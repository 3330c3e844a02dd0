"""Reports of a run at log points and at its end."""
