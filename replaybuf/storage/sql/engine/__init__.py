"""Engines, one for each database: connections, transactions, locks, the meaning of errors, and their thread."""
