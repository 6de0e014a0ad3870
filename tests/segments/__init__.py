"""Payloads that are kept apart: the places for segments, what lies in them, and buffers under every fault."""
