"""Segments: files or objects with payloads of groups, outside the database."""
