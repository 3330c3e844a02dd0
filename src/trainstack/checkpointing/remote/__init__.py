"""Runs whose files are kept in an object store, such as S3, with a local copy."""
