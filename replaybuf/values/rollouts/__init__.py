"""Rollouts and groups: their fields, types and staleness, and the metadata that needs no payload."""
