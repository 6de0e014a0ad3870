"""A load generator: processes that put and take groups as workers and trainers do, against any database.

`run` is the parent: it checks the database, starts a process for each worker and trainer (`process`, which runs the
loops of `load`), collects what they report, and cleans up. `report` makes figures and sentences of it.
"""
