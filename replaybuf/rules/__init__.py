"""What is drawn, evicted, counted and allowed: pure functions and values."""
