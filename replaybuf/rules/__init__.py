"""Rules of sampling, eviction, counting and limits: pure functions and values."""
