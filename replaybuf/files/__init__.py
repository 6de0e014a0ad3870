"""Rollouts in files: exports, imports of exports and of other programs' rollouts, and of saved buffers."""
