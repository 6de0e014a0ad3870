"""Whole copies of a buffer: snapshots and portable states."""
