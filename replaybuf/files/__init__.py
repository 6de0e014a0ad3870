"""Rollouts in files: exports of ours, and imports of these, of others' rollouts, saved buffers and databases."""
