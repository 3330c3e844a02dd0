"""Values of a run: plan, order, counters, random state."""
