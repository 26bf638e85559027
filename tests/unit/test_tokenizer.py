"""Encoding, incremental decoding, stop strings and chat templates, against `tokenizers` and transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models import hub
from llmserve.runtime.tokenizer import ChatTemplateError, IncrementalDecoder, Tokenizer

BACKENDS = {
    "byte_level": small_tokenizers.byte_level(),
    "llama": small_tokenizers.sentencepiece(strip=True),
    "gemma": small_tokenizers.sentencepiece(strip=False),
    "metaspace": small_tokenizers.metaspace(),
    "words": small_tokenizers.words(),
}
TOKENIZERS = {name: Tokenizer(backend, {}, {}) for name, backend in BACKENDS.items()}
BYTE_LEVEL = TOKENIZERS["byte_level"]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` in pieces of the lengths `cuts`, then the rest."""
    pieces = []
    for length in cuts:
        pieces.append(ids[:length])
        ids = ids[length:]
    return [*pieces, ids]


def stream(decoder: IncrementalDecoder, pieces: list[list[int]]) -> list[str]:
    return [*(decoder.add(piece) for piece in pieces), decoder.finish()]


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# ---- incremental decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_cutting_of_any_tokens_joins_to_the_decoded_whole(name: str, data: st.DataObject) -> None:
    backend, tokenizer = BACKENDS[name], TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 5), max_size=20))
    skip = data.draw(st.booleans())

    texts = stream(IncrementalDecoder(tokenizer, skip), cut(ids, cuts))

    assert "".join(texts) == tokenizer.decode(ids, skip)
    if name not in ("llama", "gemma"):  # where a wrong byte spoils the whole run of byte tokens; see Tokenizer.decode
        assert "".join(texts) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
@settings(max_examples=150)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 3), max_size=20))
def test_text_comes_back_and_no_character_is_split(name: str, text: str, cuts: list[int]) -> None:
    backend, tokenizer = BACKENDS[name], TOKENIZERS[name]
    ids = text_ids(tokenizer, text)

    texts = stream(IncrementalDecoder(tokenizer), cut(ids, cuts))

    assert "".join(texts) == backend.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in texts)


def test_a_character_is_held_until_its_last_byte() -> None:
    ids = [BYTE_LEVEL.token_id(visible) for visible in "ðŁĺĢ"]  # the four bytes of 😀, each a token
    decoder = IncrementalDecoder(BYTE_LEVEL)
    assert [decoder.add([token_id]) for token_id in ids if token_id is not None] == ["", "", "", "😀"]


def test_a_character_that_never_ends_is_a_replacement_character() -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL)
    token_id = BYTE_LEVEL.token_id("ð")
    assert token_id is not None
    assert decoder.add([token_id]) == ""
    assert decoder.finish() == "\ufffd"


def test_the_leading_space_of_a_text_is_dropped_once() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [tokenizer.token_id(token) for token in ("</s>", "▁the", "▁the")]
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.add([token_id]) for token_id in ids if token_id is not None] == ["", "the", " the"]


def test_special_tokens_are_shown_on_request() -> None:
    end = BYTE_LEVEL.token_id("<|im_end|>")
    assert end is not None
    assert BYTE_LEVEL.decode([end], skip_special_tokens=True) == ""
    assert BYTE_LEVEL.decode([end], skip_special_tokens=False) == "<|im_end|>"


def test_bytes_and_text_of_a_token() -> None:
    first_byte = BYTE_LEVEL.token_id("ð")
    assert first_byte is not None
    assert BYTE_LEVEL.token_bytes(first_byte) == b"\xf0"
    assert BYTE_LEVEL.token_text(first_byte) == "\ufffd"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size + 7) == b""


# ---- stop strings --------------------------------------------------------------------------------------------------


def until_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """What a reader who goes character by character sees: the naive model of the decoder."""
    for end in range(1, len(text) + 1):
        met = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400)
@given(
    text=st.text("ab é", max_size=30),
    stop=st.lists(st.text("ab é", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 4), max_size=20),
)
def test_stop_strings_cut_where_a_slow_reader_would(text: str, stop: list[str], cuts: list[int]) -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=tuple(stop))
    texts = stream(decoder, cut(text_ids(BYTE_LEVEL, text), cuts))
    assert ("".join(texts), decoder.stopped) == until_stop(text, tuple(stop))


def test_a_partial_stop_string_is_withheld_and_released() -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=("END",))
    assert decoder.add(text_ids(BYTE_LEVEL, "xEN")) == "x"
    assert decoder.add(text_ids(BYTE_LEVEL, "Ey")) == "ENEy"
    assert decoder.add(text_ids(BYTE_LEVEL, "zE")) == "z"
    assert decoder.finish() == "E"
    assert decoder.stopped is None


def test_nothing_follows_a_stop_string() -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=("\n\n", "."))
    assert decoder.add(text_ids(BYTE_LEVEL, "one\n")) == "one"
    assert decoder.add(text_ids(BYTE_LEVEL, "\ntwo.")) == ""
    assert decoder.stopped == "\n\n"
    assert decoder.add(text_ids(BYTE_LEVEL, "three")) == ""
    assert decoder.finish() == ""


@settings(max_examples=100)
@given(cuts=st.lists(st.integers(0, 4), max_size=20), minimum=st.integers(0, 12))
def test_a_stop_string_counts_only_after_the_minimum(cuts: list[int], minimum: int) -> None:
    ids = [BYTE_LEVEL.encode("a")[0], BYTE_LEVEL.encode("b")[0]] * 5
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=("ab",), min_tokens=minimum)
    text = "".join(stream(decoder, cut(ids, cuts)))
    first_allowed = next((end for end in range(2, 11, 2) if end > minimum), None)
    assert text == ("ab" * 5 if first_allowed is None else "ab" * (first_allowed // 2 - 1))


# ---- encoding ------------------------------------------------------------------------------------------------------


def test_bos_is_added_where_the_configuration_says_so(tmp_path: Path) -> None:
    backend = small_tokenizers.sentencepiece(strip=True)
    small_tokenizers.save(backend, tmp_path, add_bos_token=True, add_eos_token=False, bos_token={"content": "<s>"})
    tokenizer = Tokenizer.load(tmp_path)
    bos = tokenizer.token_id("<s>")
    assert tokenizer.encode("a", add_special_tokens=True) == [bos, *tokenizer.encode("a", add_special_tokens=False)]


def test_a_long_text_is_not_truncated(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(small_tokenizers.save(backend, tmp_path))
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


def test_named_special_tokens_are_special(tmp_path: Path) -> None:
    backend = small_tokenizers.words()
    tokenizer = Tokenizer.load(small_tokenizers.save(backend, tmp_path, eos_token="the"))
    the = tokenizer.token_id("the")
    assert the is not None
    assert tokenizer.decode([the]) == ""


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    small_tokenizers.save(BACKENDS["words"], tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "template", [5, [{"name": "default"}], [{"name": "default", "template": 5}], ["x"], b"caf\xe9"]
)
def test_a_template_that_is_no_text_is_named(template: object, tmp_path: Path) -> None:
    small_tokenizers.save(BACKENDS["llama"], tmp_path, None)
    if isinstance(template, bytes):
        (tmp_path / "chat_template.jinja").write_bytes(template)
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_looks_at_neighbours_is_refused() -> None:
    backend = small_tokenizers.words()
    backend.decoder = tokenizers.decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        Tokenizer(backend, {}, {})


# ---- chat templates ------------------------------------------------------------------------------------------------

TEMPLATES = {
    "chatml": small_tokenizers.CHATML,
    "whitespace": """
{%- for message in messages %}
    {% if message.role == 'system' %}
        {{- 'SYS ' + message.content | trim }}
    {% else %}
{{ message.role }}: {{ message.content }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}assistant:{% endif %}""",
    "state": "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}[{{ ns.n }}] {{ m.content }}{{ eos_token }}"
    "{% if ns.n == 2 %}{% break %}{% endif %}{% endfor %}{{ unk_token }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ dict(a=1) | tojson }}{{ tools is none }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ name is defined }}",
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <brief> & kind  "},
    {"role": "user", "content": "Grüße 😀", "name": None},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": 'And \'"now"?'},
]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=BACKENDS["llama"], bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_renders_as_in_transformers(name: str, prompt: bool, reference: Any, tmp_path: Path) -> None:
    backend = small_tokenizers.sentencepiece(strip=True)
    small_tokenizers.save(backend, tmp_path, TEMPLATES[name], bos_token="<s>", eos_token={"content": "</s>"})
    variables = {"enable_thinking": False} if name == "variables" else {}

    rendered = Tokenizer.load(tmp_path).apply_chat_template(CHAT, add_generation_prompt=prompt, **variables)

    assert rendered == reference.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], add_generation_prompt=prompt, tokenize=False, **variables
    )


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    small_tokenizers.save(BACKENDS["llama"], tmp_path, "configuration")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).apply_chat_template(CHAT) == "file"


def test_named_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    small_tokenizers.save(BACKENDS["llama"], tmp_path, None)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"type": "function"}]) == "tools"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on this chat"),
        ("{{ ''.__class__.__mro__ }}", "refuses this chat"),
        ("{{ namespace(__class__=1) }}", "begins with an underscore"),
        ("{% for %}", "does not compile"),
    ],
)
def test_what_a_template_refuses_is_said(template: str, message: str) -> None:
    tokenizer = Tokenizer(BACKENDS["llama"], {}, {"default": template})
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.apply_chat_template(CHAT)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        BYTE_LEVEL.apply_chat_template(CHAT)


# ---- the default model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_tokenizer() -> Tokenizer:
    return Tokenizer.load(hub.resolve(hub.default_model()).tokenizer_dir)


@pytest.fixture(scope="module")
def default_reference() -> Any:
    from reference import tokenizer

    return tokenizer()


@pytest.mark.parametrize("text", [*small_tokenizers.TEXT, *small_tokenizers.CHATS, "", " ", "\r\n\x00\x1b[31m"])
def test_the_default_model_encodes_as_in_transformers(
    text: str, default_tokenizer: Tokenizer, default_reference: Any
) -> None:
    assert default_tokenizer.encode(text) == default_reference(text)["input_ids"]
    assert default_tokenizer.decode(default_tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[1:2], CHAT[:3]])
@pytest.mark.parametrize("prompt", [True, False])
def test_the_default_models_template_renders_as_in_transformers(
    chat: list[dict[str, Any]], prompt: bool, default_tokenizer: Tokenizer, default_reference: Any
) -> None:
    rendered = default_tokenizer.apply_chat_template(chat, add_generation_prompt=prompt)
    assert rendered == default_reference.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(0, 49_151), max_size=60),
    cuts=st.lists(st.integers(0, 5), max_size=30),
    skip=st.booleans(),
)
def test_the_default_models_tokens_stream_as_they_decode(
    ids: list[int], cuts: list[int], skip: bool, default_tokenizer: Tokenizer, default_reference: Any
) -> None:
    texts = stream(IncrementalDecoder(default_tokenizer, skip), cut(ids, cuts))
    assert "".join(texts) == default_reference.decode(ids, skip_special_tokens=skip)
