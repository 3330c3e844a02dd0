"""Published accuracies of private training and ours: `make dp-table`."""
