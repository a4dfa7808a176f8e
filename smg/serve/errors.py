"""Why `serve` does not start, or stops."""

from __future__ import annotations

from smg.errors import Error


class ServeError(Error):
    """Something that the operator has to change; the message says what. Nothing is left running."""
