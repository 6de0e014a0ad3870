"""replaybuf beside other ways to keep groups, each in an environment of its own. `python -m benchmarks peers`."""
