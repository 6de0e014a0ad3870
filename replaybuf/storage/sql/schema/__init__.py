"""Tables, views, and their creation."""
