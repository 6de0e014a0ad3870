"""Storage backends: where groups are kept."""
