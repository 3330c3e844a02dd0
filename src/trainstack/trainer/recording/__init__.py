"""Recording of the steps of a run; `step_log` reads what is written here."""
