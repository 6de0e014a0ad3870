"""The contents of a database as plain data, for the command line, the page and metrics, which look at it from outside.

SQL is used here and below, not above.
"""
