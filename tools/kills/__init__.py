"""Trainings that are killed and have to end with the bits of those that are not."""
