"""Rollouts and groups: their fields, types, staleness, and what is known of them without their payload."""
