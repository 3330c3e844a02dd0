"""Recorded metrics on their way to the screen, files and trackers."""
