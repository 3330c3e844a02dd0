"""The methods of `Trainer`, by topic."""
