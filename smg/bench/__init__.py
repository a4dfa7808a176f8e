"""Measurements of smg, each beside its rivals in the same run: `python -m smg bench`."""
