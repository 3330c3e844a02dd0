"""Values of a run: training plan, data order, counters, random states, checksums, memory estimate."""
