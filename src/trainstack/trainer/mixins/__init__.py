"""The methods of `Trainer`, by idea."""
