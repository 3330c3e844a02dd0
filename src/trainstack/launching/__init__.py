"""Launching of several processes from a script or a notebook."""
