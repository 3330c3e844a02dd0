"""Requests, messages and bytes of a run, counted for some ranks in threads and computed for thousands."""
