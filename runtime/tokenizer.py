"""The tokenizer of a checkpoint: text to ids, ids to text (whole or incrementally), and chats to prompts.

Built on the `tokenizers` library: importing transformers would cost the front 280 MB and 3 s.
"""

import codecs
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, processors

from llmserve.runtime.chat_template import ChatTemplate, ChatTemplateError
from llmserve.runtime.config import ConfigError
from llmserve.runtime.token_bytes import TokenBytes

__all__ = ["ChatTemplateError", "IncrementalDecoder", "Tokenizer"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Made by `Tokenizer.load`. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], templates: Mapping[str, str]) -> None:
        self._backend = backend
        self.special_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))}
        """Named special tokens ("bos_token" …), which chat templates refer to."""
        self._mark_special_tokens()
        self._set_post_processor(config)
        self._sources = templates
        self._templates: dict[str, ChatTemplate] = {}
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._all = TokenBytes(backend)
        self._without_special = TokenBytes(backend, self.special_ids)

    @staticmethod
    def load(directory: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and the chat template. Raises ConfigError."""
        directory = Path(directory)
        try:
            backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exceptions
            raise ConfigError(f"no usable tokenizer.json in {directory}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
        return Tokenizer(backend, config, _template_sources(directory, config))

    def _mark_special_tokens(self) -> None:
        known = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        missing = [text for text in self.special_tokens.values() if text not in known]
        self._backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])

    def _set_post_processor(self, config: Mapping[str, Any]) -> None:
        """Adds BOS and EOS as the configuration says, if it does, like transformers."""
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return
        bos = self.special_tokens.get("bos_token") if config.get("add_bos_token") else None
        eos = self.special_tokens.get("eos_token") if config.get("add_eos_token") else None
        wrapped = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
        used = [(text, self._backend.token_to_id(text)) for text in (bos, eos) if text]
        self._backend.post_processor = processors.TemplateProcessing(single=wrapped, special_tokens=used)

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes the texts one by one: the library's own batch encoding would use every core, which the model
        needs.
        """
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 become U+FFFD.

        In a run of byte tokens ("<0xE2>") with an invalid one, the valid characters are kept, as a stream has shown
        them already; `tokenizers` would replace the whole run.
        """
        decoder = IncrementalDecoder(self, skip_special_tokens)
        return decoder.add(ids) + decoder.finish()

    def bytes_of(self, skip_special_tokens: bool) -> TokenBytes:
        return self._without_special if skip_special_tokens else self._all

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text; b"" for an unknown id."""
        return self._all[token_id]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the vocabulary's token that is spelled exactly `text`; None where there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    @property
    def tool_template(self) -> str | None:
        """The source of the chat template that renders tools; None if none does."""
        source = self._sources.get("tool_use") or self._sources.get("default", "")
        return source if re.search(r"\btools\b", source) else None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a chat; encode it with add_special_tokens=False. `variables` are the template's own.

        Raises ChatTemplateError when there is no template or it refuses the chat.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ChatTemplateError("the model has no chat template: it is not made for chat, use completions")
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name])
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        return self._templates[name].render(messages, add_generation_prompt=add_generation_prompt, **given)


class IncrementalDecoder:
    """Turns the tokens of one sequence into text as they come, in constant time per token and bounded memory.

    Text is released once it is certain: never part of a UTF-8 character, and nothing that may still become part of a
    stop string. However the tokens are divided into `add` calls, the texts concatenate to `Tokenizer.decode` of all
    tokens, up to the stop string. Of several stop strings the one that is completed first counts, and of those that end
    together the longest.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
    ) -> None:
        """A stop string that ends within the first `min_tokens` tokens does not count."""
        self._bytes = tokenizer.bytes_of(skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._exempt = min_tokens if stop else 0
        self._at_start = self._bytes.first_differs
        self._strip = self._bytes.strip_left
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found; everything after it is ignored."""

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next ids and returns the text that has become certain."""
        if self._exempt:
            early, ids = ids[: self._exempt], ids[self._exempt :]
            self._exempt -= len(early)
            return self._release(self._text(early), may_stop=False) + (self.add(ids) if ids else "")
        return self._release(self._text(ids))

    def finish(self) -> str:
        """Ends the sequence and returns the text that was withheld. An incomplete character becomes U+FFFD."""
        rest = self._release(self._utf8.decode(b"", True))
        if self.stopped is None:
            rest, self._held = rest + self._held, ""
        return rest

    def _text(self, ids: Sequence[int]) -> str:
        data = b""
        if self._at_start:
            for position, token_id in enumerate(ids):
                if not self._bytes.stands_for_nothing(token_id):
                    self._at_start = False
                    data, ids = self._bytes.first(token_id), ids[position + 1 :]
                    break
            else:
                return ""
        text = self._utf8.decode(data + self._bytes.join(ids))
        while self._strip and text:
            self._strip = self._strip - 1 if text[0] == " " else 0
            text = text.removeprefix(" ") if text[0] == " " else text
        return text

    def _release(self, text: str, may_stop: bool = True) -> str:
        if not self._stop:
            return text
        if self.stopped is not None:
            return ""
        known, text = len(self._held), self._held + text
        if may_stop:
            ends = [(at + len(stop), at, stop) for stop in self._stop if (at := _find(text, stop, known)) >= 0]
            if ends:
                _, start, self.stopped = min(ends)
                self._held = ""
                return text[:start]
        certain = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[certain:]
        return text[:certain]


def _find(text: str, stop: str, known: int) -> int:
    """The index of the first `stop` in `text` that ends after its first `known` characters; -1 if there is none."""
    return text.find(stop, max(0, known - len(stop) + 1))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content


def _token_text(entry: object) -> str:
    """The text of a special token, which a config gives as a string or as {"content": …}; "" for anything else."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The sources of the chat templates by name. Files take precedence over the configuration, as in transformers."""
    inline = config.get("chat_template")
    named = inline if isinstance(inline, list) else [{"name": "default", "template": inline}] if inline else []
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    try:
        sources = msgspec.convert({entry["name"]: entry["template"] for entry in named}, dict[str, str])
        return sources | {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.exists()}
    except (OSError, KeyError, TypeError, ValueError) as error:  # ValueError: what is no text, as bytes or as JSON
        raise ConfigError(f"cannot read the chat template: {type(error).__name__}: {error}") from error
