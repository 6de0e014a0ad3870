"""Faces of other frameworks, and for their trainers: a room each, over the public calls only."""
