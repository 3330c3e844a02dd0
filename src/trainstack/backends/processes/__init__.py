"""Processes that train together: environment, rendezvous, collectives, watchdog."""
