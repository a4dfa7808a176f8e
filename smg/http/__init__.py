"""The OpenAI-style HTTP front."""
