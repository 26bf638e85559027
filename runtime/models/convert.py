"""Converts what a checkpoint lacks, once, in a child process, and keeps it in the cache (caches.py).

A converted directory holds tokenizer.json and tokenizer_config.json as transformers writes them, chat_template.jinja if
there is one, and for a GGUF file also config.json and generation_config.json. Only the child imports transformers.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from llmserve.runtime.caches import cached
from llmserve.runtime.config import ConfigError
from llmserve.runtime.models.gguf import GgufHeader, read_header
from llmserve.runtime.models.gguf_config import to_hf_config
from llmserve.runtime.tethered import run_tethered

_VERSION = 3
"""Part of the cached names: raised when a conversion changes, so that older results are not used."""

_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_SLOW_TOKENIZER_FILES = (*_VOCABULARIES, "tokenizer_config.json", "merges.txt", "special_tokens_map.json")
_TIMEOUT_S = 300

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>")
"""How chat templates close an assistant's turn. GGUF files of phi3, of base models and of older converters name another
token as the one that ends a text, and answers would go on for ever. llama.cpp always ends them at these tokens.
"""


def converted_gguf(header: GgufHeader) -> Path:
    """The directory with the config and tokenizer of a GGUF file. Raises ConfigError."""
    to_hf_config(header)  # raises for an unsupported architecture before a child is started
    return _converted("gguf", Path(header.path), header.digest)


def converted_tokenizer(directory: Path) -> Path:
    """The directory with the tokenizer.json of a checkpoint that only has files of a slow tokenizer. Raises
    ConfigError.
    """
    files = [directory / name for name in _SLOW_TOKENIZER_FILES if (directory / name).is_file()]
    if not any(file.name in _VOCABULARIES for file in files):
        raise ConfigError(f"{directory} has no tokenizer: expected tokenizer.json, or tokenizer.model")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode() + file.read_bytes())
    return _converted("tokenizer", directory, digest.hexdigest())


def _converted(kind: Literal["gguf", "tokenizer"], source: Path, digest: str) -> Path:
    try:
        target = cached("checkpoints", f"{kind}-{_VERSION}-{digest[:32]}")
        if (target / "tokenizer.json").is_file():
            return target
        with open(target.with_name("lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target / "tokenizer.json").is_file():  # else another launch was faster
                work = target.with_name(".unfinished")
                shutil.rmtree(work, ignore_errors=True)  # left by a launch that was killed
                work.mkdir()
                try:
                    _run_child(kind, source, work)
                    work.rename(target)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"there is nowhere to keep what is made of {source}: {error}; set XDG_CACHE_HOME to a directory of your own"
        ) from error
    return target


def _run_child(kind: str, source: Path, work: Path) -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "llmserve.runtime.models.convert", kind, str(source), str(work)]
    try:
        child = run_tethered(command, _TIMEOUT_S, environment)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the tokenizer of {source} was not converted within {_TIMEOUT_S} s") from error
    if child.returncode != 0:
        reason = next(
            (line for line in reversed(child.stderr.splitlines()) if line.strip()), f"exit code {child.returncode}"
        )
        raise ConfigError(f"the tokenizer of {source} cannot be converted: {reason.strip()}")


def _main(kind: str, source: Path, target: Path) -> None:
    """Runs in the child: writes the files into `target`."""
    if kind == "gguf":
        from transformers import PreTrainedTokenizerFast

        link = target / "model.gguf"  # alone in its directory, because transformers prefers a tokenizer.json beside it
        link.symlink_to(source)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(target, gguf_file=link.name, local_files_only=True)
        link.unlink()
        config = to_hf_config(read_header(source))
        vocab, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
        ends = [vocab[text] for text in _TURN_ENDS if text in template and text in vocab]
        config["eos_token_id"] = list(dict.fromkeys([*config["eos_token_id"], *ends]))
        (target / "config.json").write_text(json.dumps(config, indent=2))
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    tokenizer.save_pretrained(target)
    if not (target / "tokenizer.json").is_file():
        raise ConfigError("transformers wrote no tokenizer.json for it")


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
