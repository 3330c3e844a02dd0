"""Modules and runs that many tests share."""
