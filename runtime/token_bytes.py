"""The bytes that each token of a vocabulary stands for.

A tokenizer.json describes a decoder, a chain of steps that turn tokens into text. The steps that language models use
all work token by token, so that the text of a sequence is the concatenation of its tokens' bytes and incremental
decoding is cheap and exact. What a decoder does only at the beginning of a text is kept apart (`first`, `strip_left`).
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from llmserve.runtime.config import ConfigError

Step = Callable[[str | bytes], str | bytes]


class TokenBytes:
    """Looks up the bytes of tokens. Raises ConfigError for a decoder that does not work token by token.

    The ids in `skip` and unknown ids stand for nothing.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self.skip = skip
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
        chain = _Chain(decoder)
        self._steps = chain.steps
        self._first_steps = chain.first_steps
        self.strip_left = chain.strip_left
        """How many leading spaces are stripped from a text."""
        self.first_differs = chain.first_steps != chain.steps
        self._table = _Table(self._look_up)

    def join(self, ids: Sequence[int]) -> bytes:
        table = self._table
        return b"".join([table[token_id] for token_id in ids])

    def __getitem__(self, token_id: int) -> bytes:
        return self._table[token_id]

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        return self._look_up(token_id, self._first_steps)

    def stands_for_nothing(self, token_id: int) -> bool:
        return token_id in self.skip or self._tokenizer.id_to_token(token_id) is None

    def _look_up(self, token_id: int, steps: "list[Step] | None" = None) -> bytes:
        token: str | bytes | None = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self.skip:
            return b""
        for step in self._steps if steps is None else steps:
            token = step(token)
        return token if isinstance(token, bytes) else token.encode()


class _Table(dict[int, bytes]):
    """A cache of token bytes, filled on first use and bounded by the vocabulary."""

    def __init__(self, look_up: Callable[[int], bytes]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._look_up(token_id)
        return value


class _Chain:
    """The steps of a decoder, read from its JSON description. Their names are those of the `tokenizers` library."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.steps: list[Step] = []
        self.first_steps: list[Step] = []
        self.strip_left = 0
        self._fused = False
        if decoder is None:  # tokens joined by spaces
            self._add(lambda token: b" " + token if isinstance(token, bytes) else " " + token, None)
        else:
            self._read(decoder)

    def _add(self, step: Step, first: Step | None) -> None:
        self.steps.append(step)
        if first is not None:
            self.first_steps.append(first)

    def _read(self, decoder: dict[str, Any]) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": list(steps)}:
                for step in steps:
                    self._read(step)
            case {"type": "ByteLevel"}:
                self._add(_byte_level, _byte_level)
            case {"type": "ByteFallback"}:
                self._add(_byte_fallback, _byte_fallback)
            case {"type": "Fuse"}:
                self._fused = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replace = _on_text(lambda token: token.replace(pattern, content))
                self._add(replace, replace)
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if self._fused:
                self.strip_left = start
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)} if not self._fused:
                strip = _on_text(lambda token: _strip(token, content, start, stop))
                self._add(strip, strip)
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                replace = _on_text(lambda token: token.replace(mark, " "))
                drop = _on_text(lambda token: token.replace(mark, ""))
                self._add(replace, replace if scheme == "never" else drop)
            case _:
                raise ConfigError(
                    f"the tokenizer decodes with {json.dumps(decoder)}, which does not work token by token; "
                    "supported: ByteLevel, ByteFallback, Fuse, Metaspace, and Replace and Strip of plain strings"
                )


def _on_text(step: Callable[[str], str]) -> Step:
    return lambda token: step(token) if isinstance(token, str) else token


def _strip(token: str, content: str, start: int, stop: int) -> str:
    for _ in range(start):
        token = token.removeprefix(content)
    for _ in range(stop):
        token = token.removesuffix(content)
    return token


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_fallback(token: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token) if isinstance(token, str) else None
    return bytes([int(match[1], 16)]) if match else token


def _byte_characters() -> dict[str, int]:
    """GPT-2's visible character for each byte: https://github.com/openai/gpt-2/blob/master/src/encoder.py, inverted."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_characters()


def _byte_level(token: str | bytes) -> str | bytes:
    if isinstance(token, bytes):
        return token
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()
