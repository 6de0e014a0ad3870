"""Work around transactions: group commit, delivery, background work, noticing changes."""
