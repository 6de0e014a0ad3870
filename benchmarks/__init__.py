"""Benchmarks: the cost of a replay buffer in a database beside bare drivers and a dict in memory. See README.md."""
