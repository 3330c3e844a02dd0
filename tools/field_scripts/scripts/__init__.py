"""One file for each public script: `plain()` trains as the script does, `port()` by trainstack; both return weights."""
