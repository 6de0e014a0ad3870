"""One way to each database: connections, transactions, locks, errors, the thread."""
