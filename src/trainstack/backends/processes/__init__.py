"""Processes that train together: launcher environment, rendezvous, collectives, watchdog."""
