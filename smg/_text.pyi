from collections.abc import Sequence
from typing import SupportsIndex

from tokenizers import Tokenizer

MAX_IDS: int
MAX_STOP_BYTES: int

class TokenTable:
    tokenizer: Tokenizer
    decoder: str
    def __init__(self, tokenizer: Tokenizer) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, token: int) -> bool: ...
    @property
    def exact(self) -> bool: ...
    def is_special(self, token: int) -> bool: ...
    def bytes_of(self, token: int) -> bytes: ...

class StopStrings:
    strings: tuple[str, ...]
    def __init__(self, strings: Sequence[str]) -> None: ...

class Detokenizer:
    table: TokenTable
    stops: StopStrings | None
    token_count: int
    unknown: int
    stopped: bool
    def __init__(
        self,
        table: TokenTable,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: StopStrings | None = None,
        no_stop_trim: bool = False,
        min_tokens: int = 0,
        prompt_tail_ids: Sequence[SupportsIndex] | None = None,
    ) -> None: ...
    def push(self, token_ids: Sequence[SupportsIndex]) -> str: ...
    def finish(self) -> str: ...
    @property
    def stop_match(self) -> str | None: ...
