"""One word that several processes abide by, whoever dies when: a file in the instance's directory, written once.

Each may try to write its word; the first one that is there counts for all. With it an update of several replicas'
weights is carried out by all of them or by none.
"""

import os
import re
import secrets
from pathlib import Path
from typing import Literal

NAME = re.compile(r"decision-[0-9a-f]{1,40}")
"""No other file of an instance's directory has such a name."""

Word = Literal["commit", "abort"]


def new_name() -> str:
    return f"decision-{secrets.token_hex(8)}"


def decide(directory: Path, name: str, word: Word) -> Word:
    """Says `word` if nobody has said one before; the word that counts."""
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
    """The word, None before there is one."""
    try:
        return "commit" if (directory / name).read_text() == "commit" else "abort"
    except FileNotFoundError:
        return None
