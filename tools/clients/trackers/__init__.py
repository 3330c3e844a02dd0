"""Scripts of users of tracking services, against the real packages; `python -m tools.clients.trackers` runs them."""
