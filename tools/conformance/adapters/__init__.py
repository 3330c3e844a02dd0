"""One trainer a file."""
