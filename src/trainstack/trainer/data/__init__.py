"""Training data: which sample comes when, and how it is loaded."""
