"""What there is in a database, in plain data, for those who look at it from outside: `cli` and `doctor`.

They open it here (`reader`, `writer`), ask (`groups`, `overview`, `checkpoints`, `schema`, `statement`), copy it
(`snapshots`), and see and mend what is wrong with it (`checkup`, `rescue`). SQL is used here and below, and not above.
"""
