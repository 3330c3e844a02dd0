"""Record the steps of a run. `step_log` reads the files."""
