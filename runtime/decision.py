"""An atomic decision between several processes: a write-once file in the instance's directory.

Any process may try to decide, and the first word written counts for all, whichever process dies when. With it an update
of the weights is carried out by all replicas or by none.
"""

import os
import re
import secrets
from pathlib import Path
from typing import Literal

NAME = re.compile(r"decision-[0-9a-f]{1,40}")
"""The names of such files; no other file in an instance's directory matches."""

Word = Literal["commit", "abort"]


def new_name() -> str:
    return f"decision-{secrets.token_hex(8)}"


def decide(directory: Path, name: str, word: Word) -> Word:
    """Decides `word` unless it is decided already. Returns the word that counts."""
    draft = directory / f".{name}-{os.getpid()}-{secrets.token_hex(4)}"
    draft.write_text(word)
    try:
        os.link(draft, directory / name)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return decided(directory, name) or "abort"


def decided(directory: Path, name: str) -> Word | None:
    """The word that was decided; None before that."""
    try:
        return "commit" if (directory / name).read_text() == "commit" else "abort"
    except FileNotFoundError:
        return None
