"""One way to each database: connections, transactions, locks, what errors mean, the thread that all of it runs in."""
