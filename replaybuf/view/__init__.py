"""The views of a database for people: frozen dataclasses, a function that reads each, and the columns of their tables.

The command line prints these columns, the page is templates over them, and JSON is their fields.
"""
