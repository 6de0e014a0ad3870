"""What is stored: rollouts and their fields, and their bytes."""
