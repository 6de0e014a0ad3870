"""A load generator: processes that put and take groups as workers and trainers do, against any database.

`run` is the parent: it checks the database, starts a process for each worker and trainer (`process`, `loads`), adds up
their counters (`counted`), and cleans up. `results` makes figures and sentences of the totals, `page` a text and a
picture.
"""
