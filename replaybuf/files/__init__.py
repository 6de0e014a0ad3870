"""Rollouts in files: exports of ours, and imports of these, of others' rollouts, and of saved buffers."""
