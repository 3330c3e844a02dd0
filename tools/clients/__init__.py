"""Scripts of users of other projects, each run against the real package; `python -m tools.clients` runs them."""
