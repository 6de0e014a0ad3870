"""Reads the contents of a database as plain data for the command line, the web page and metrics.

SQL is used in this package and below, not above.
"""
