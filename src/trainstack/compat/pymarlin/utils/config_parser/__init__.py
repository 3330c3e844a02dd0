"""The parser of the command line."""
