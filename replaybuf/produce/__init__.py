"""The producer side: what is generated next, from which prompts."""
