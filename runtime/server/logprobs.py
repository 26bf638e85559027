"""Logprobs in three formats: OpenAI's for chats, OpenAI's for completions, and the native one."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from llmserve.runtime.logprobs import unpacked
from llmserve.runtime.messages import Logprobs
from llmserve.runtime.tokenizer import IncrementalDecoder, Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI uses the same value."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, its logprob (None for the first token of a prompt) and the likeliest tokens at its position."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


def unpack(ids: Sequence[int], logprobs: Logprobs) -> list[TokenLogprob]:
    """The logprobs of the k tokens `ids`; `logprobs` must hold as many. Values are ones that JSON can represent."""
    return [
        TokenLogprob(token_id, None, [])
        if math.isnan(value)
        else TokenLogprob(token_id, max(value, LOWEST), [(i, max(v, LOWEST)) for i, v in top])
        for token_id, (value, top) in zip(ids, unpacked(logprobs), strict=True)
    ]


class ChatTokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: "list[ChatTokenLogprob] | None" = None


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """OpenAI's format for chats: each token with its bytes, and the likeliest tokens likewise."""

    def one(id: int, logprob: float | None, top: list[ChatTokenLogprob] | None) -> ChatTokenLogprob:
        data = tokenizer.token_bytes(id)
        return ChatTokenLogprob(
            data.decode("utf-8", "replace"), LOWEST if logprob is None else logprob, list(data), top
        )

    return ChatLogprobs([one(e.token_id, e.logprob, [one(i, v, None) for i, v in e.top]) for e in entries])


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionLogprobEncoder:
    """OpenAI's format for completions, for the tokens of one choice as they come.

    `text_offset` is the character position of a token in the choice's `text`, which begins with the prompt if `echo` is
    set.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._offset = 0

    def encode(self, entries: Sequence[TokenLogprob], want_top: bool) -> CompletionLogprobs:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.add([entry.token_id]))
        return CompletionLogprobs(
            tokens=[self._spell(entry.token_id) for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries] if want_top else None,
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        """The likeliest tokens and the sampled one. Of two with the same spelling the likelier one counts."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for id, value in [*entry.top, (entry.token_id, entry.logprob)]:
            top.setdefault(self._spell(id), value)
        return top

    def _spell(self, id: int) -> str:
        """A token's text, or its bytes as `bytes:\\xe2\\x80` where they are not valid UTF-8, as at OpenAI."""
        data = self._tokenizer.token_bytes(id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


NativeLogprob = tuple[float | None, int, str]
"""[logprob, token id, token text], as in SGLang."""


def native_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> list[NativeLogprob]:
    return [(entry.logprob, entry.token_id, tokenizer.token_text(entry.token_id)) for entry in entries]


def native_top_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> list[list[NativeLogprob]]:
    return [[(value, id, tokenizer.token_text(id)) for id, value in entry.top] for entry in entries]
