"""With an `__init__.py`, so that the cluster, a fixture of the package, ends with its tests."""
