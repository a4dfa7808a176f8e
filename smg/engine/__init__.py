"""Sockets, handshake and the loop thread of one group; `EngineGroup` and its streams."""
