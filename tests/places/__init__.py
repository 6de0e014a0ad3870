"""Payloads that are kept apart from the database."""
