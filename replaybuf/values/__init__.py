"""Rollouts, their fields, and the codec that serialises them."""
