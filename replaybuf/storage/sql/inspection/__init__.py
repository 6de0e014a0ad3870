"""The contents of a database as plain data, for `cli` and `doctor`, which look at it from outside.

They open it (`reader`, `writer`), query it (`groups`, `overview`, `checkpoints`, `schema`, `statement`), copy it
(`snapshots`), and find and mend damage (`checkup`, `rescue`). SQL is used here and below, not above.
"""
