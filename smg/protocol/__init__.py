"""What each engine's wire looks like: one module per engine, plus the handshake they share."""
