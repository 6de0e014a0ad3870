"""Where groups are kept: one store over SQLite and PostgreSQL."""
