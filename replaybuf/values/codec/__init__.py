"""Payloads: groups of rollouts as bytes, and back."""
