"""Scripts of users of tracking services; `python -m tools.clients --only trackers/` runs them."""
