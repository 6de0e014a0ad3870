"""Benchmarks: what a replay buffer in a database costs beside bare drivers and a dict in memory. See README.md."""
