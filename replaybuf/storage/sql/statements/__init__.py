"""The statements that run inside transactions."""
