"""What a rank that is not the first does with the commands that it gets."""

import time
from typing import Any

import msgspec
import pytest

from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.engine import ranks
from llmserve.runtime.engine.batch import WorkerDied
from llmserve.runtime.engine.ranks import Commit, Discard, Stage, follow
from llmserve.runtime.models.hub import default_model, resolve


class FollowingRank:
    """A staging takes longer here than on the first rank."""

    def __init__(self) -> None:
        self.topology: Any = type("Topology", (), {"control": None})
        self.done: list[str] = []

    def receive_weights(self, checkpoint: object) -> None:
        time.sleep(0.1)
        self.done.append("staged")

    def commit_weights(self) -> None:
        self.done.append("committed")

    def discard_weights(self) -> None:
        self.done.append("discarded")


def test_what_concerns_weights_waits_for_the_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended on the first rank, which has said what comes next, and may just be about to end here."""
    stage = Stage(resolve(default_model()))
    commands = iter([stage, Commit(), stage, Discard(), stage, stage, Commit()])

    def receive(*arguments: object) -> bytes:
        for command in commands:
            return msgspec.msgpack.encode(command)
        raise RankLost("all is said")

    monkeypatch.setattr(ranks, "receive_broadcast", receive)
    rank: Any = FollowingRank()
    with pytest.raises(WorkerDied, match="all is said"):
        follow(rank)
    assert rank.done == ["staged", "committed", "staged", "discarded", "staged", "staged", "committed"]
