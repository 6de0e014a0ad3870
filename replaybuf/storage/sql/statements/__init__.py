"""What is said to the database inside of transactions."""
