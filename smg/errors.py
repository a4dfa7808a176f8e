"""Every error the package raises on purpose. Each message says what happened and what the caller can do."""

from __future__ import annotations


class Error(Exception):
    """Base of all errors of this package."""


class NoRank(Error):
    """No rank of the group can take work now: none is live, or all of them drain."""


class InvalidRank(Error):
    """The pinned rank does not exist or cannot take work now."""


class Overloaded(Error):
    """The rank's in-flight or send-queue bound is reached; retry later or add ranks."""


class NotReady(Error):
    """`ready` timed out. The message lists every rank's state; `states` has them as a list of str."""

    def __init__(self, message: str, states: list[str] | None = None) -> None:
        super().__init__(message)
        self.states = states or []


class InvalidRequest(Error):
    """A request field has a value that the engine would refuse. Nothing was sent.

    `field` is the field's name in `SamplingParams` or `submit`, `value` what was given, `allowed` what may be.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}={shown}: must be {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class StreamError(Error):
    """A stream ended without the engine's own terminal output."""


class Closed(StreamError):
    """The group (or the outlet) is closed, and with it every stream that was running; make a new one."""


class RankDied(StreamError):
    """The rank that held the request died. Resubmit; other ranks are not affected.

    `rank` is the rank's index in the group.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class DeadlineExceeded(StreamError):
    """The request's deadline passed. The engine was told to abort it."""


class Aborted(StreamError):
    """The request was aborted by this side while somebody was waiting for its output."""


class UtilityError(Error):
    """An engine refused or failed a utility call, in its own words. `rank` and `method` say which call."""

    def __init__(self, message: str, rank: int = -1, method: str = "") -> None:
        super().__init__(message)
        self.rank, self.method = rank, method


class UtilityTimeout(UtilityError):
    """An engine did not answer a utility call in time. It may have been too busy, or it hears nothing any more."""


class AddressError(Error):
    """A worker URL, handshake address, socket directory or socket path cannot be used as it is."""


class DecodeError(Error):
    """A frame is not what the engine's wire allows. `column` names the part that is wrong."""

    def __init__(self, message: str, column: str = "") -> None:
        super().__init__(message)
        self.column = column


class HandshakeError(Error):
    """A dialer's handshake or registration message cannot be used."""


class ForkedError(Error):
    """A group made before os.fork() was used in the child. Make the group after the fork."""
