"""A load generator: processes that put and take groups as workers and trainers do, against any database.

`run` checks the database, starts a process for each worker and trainer, which run the loops of `load`, collects what
they report, and cleans up. `report` makes figures and sentences of it.
"""
