"""Choosing among groups: `Router` and its policies."""
