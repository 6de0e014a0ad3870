"""A load generator: processes that put and take groups as workers and trainers do, against any database.

`run` is the parent: it looks at the database, starts a process for each worker and trainer (`process`, `loads`), adds
up what they count (`counted`), and cleans up. `results` makes figures and sentences of it, `page` a text and a picture.
"""
