"""API keys as commands take them: from a file or from a variable, never from the command line."""

from pathlib import Path

from llmserve.runtime.config import ConfigError


def key_in(file: Path) -> str:
    """The key that a file holds. Raises ConfigError."""
    source = f"the key file {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {source}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    return checked_key(text, source)


def checked_key(text: str, source: str) -> str:
    """The one key in `text`. Raises ConfigError for what no header could carry."""
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source} must hold one key: printable ASCII characters without spaces")
    return key
