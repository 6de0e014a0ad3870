"""Segments: files or objects with the payloads of groups, beside the database that has the rows."""
