"""The SQL backends: SQLite and PostgreSQL."""
