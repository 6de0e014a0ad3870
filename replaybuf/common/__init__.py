"""Helpers of every room: checks of arguments, texts, units, progress, files, cancellation."""
