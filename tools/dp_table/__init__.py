"""Published accuracies of private training beside ours: `make dp-table`."""
