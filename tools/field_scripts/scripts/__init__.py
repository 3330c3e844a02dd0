"""One file for each public script: `plain()` trains like the script, `port()` with trainstack; both return weights."""
