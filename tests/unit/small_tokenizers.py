"""Small tokenizers of every kind that language models use, built in memory."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 3.14, isn't it?",
    "Grüße aus Köln, naïve café: 日本語のテキスト 😀😀 👩‍👩‍👧 Привет мир",
    "def f(x):\n    return x + 1\n\n\tend  two  spaces",
]
CHATS = ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "not a <|im_end| token, <|endoftext|> is one"]
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """Like GPT-2's and Qwen's, with an added token that has a space in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("not special é", normalized=False)])
    return tokenizer


def sentencepiece(strip: bool) -> Tokenizer:
    """Like Llama 2's (`strip`) and Gemma's: words that begin with ▁, other bytes as tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ["▁", "▁▁", "▁a", "▁the", "b", "é", "日", "😀", "▁Grü", "ße", ".", "▁▁▁x"]:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strip else chain)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Like T5's; its decoder drops the mark of the first token."""
    words = ["<unk>", "▁", "▁a", "▁the", "b", "é", "日", "▁▁x▁", "."]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    vocab = {word: n for n, word in enumerate(["<unk>", "a", "the", " b", "é"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, chat_template: str | None = CHATML, **config: object) -> Path:
    """Writes a checkpoint's tokenizer files."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
