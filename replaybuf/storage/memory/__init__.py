"""The reference backend, in memory."""
