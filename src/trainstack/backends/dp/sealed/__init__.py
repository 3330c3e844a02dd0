"""State of a private run that nothing but optimizers and registered post-processing may change between steps."""
