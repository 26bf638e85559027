"""One word for several replicas: the first one counts, and an update of their weights abides by it."""

import threading
import time
from pathlib import Path

import msgspec
import pytest
from operated import refusal
from updated import Updated

from llmserve.runtime.decision import Word, decide, decided, new_name
from llmserve.runtime.instance import RECORD, InstanceRecord
from llmserve.runtime.messages import RpcProgress, UpdateWeightReqInput, UpdateWeightReqOutput

NAME = "decision-1"


def test_the_first_word_counts(tmp_path: Path) -> None:
    assert decided(tmp_path, NAME) is None
    assert decide(tmp_path, NAME, "abort") == "abort"
    assert decide(tmp_path, NAME, "commit") == "abort"
    assert decided(tmp_path, NAME) == "abort"
    assert [path.name for path in tmp_path.iterdir()] == [NAME], "no draft is left"


def test_all_who_speak_at_once_hear_the_same(tmp_path: Path) -> None:
    for _ in range(20):
        name, heard, start = new_name(), [], threading.Barrier(8)

        def speak(word: Word, name: str = name, heard: list[Word] = heard, start: threading.Barrier = start) -> None:
            start.wait()
            heard.append(decide(tmp_path, name, word))

        threads = [threading.Thread(target=speak, args=(word,)) for word in ("commit", "abort") * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(heard) == 8
        assert len(set(heard)) == 1


class Replica(Updated):
    """One of two replicas, whose update has come to where it waits for the word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        super().__init__(monkeypatch, directory=directory, dp_size=2)
        self.client = self.call(UpdateWeightReqInput(model_path="/models/new", decision=NAME))
        self.turn_until(lambda: self.stage == "prepared")

    def turn_until(self, condition: "object") -> None:
        deadline = time.monotonic() + 60
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline
            self.turn()
            time.sleep(0.001)

    @property
    def stage(self) -> str:
        last = (self.heard(self.client) or [None])[-1]
        return last.stage if isinstance(last, RpcProgress) else ""


def test_a_replica_that_is_prepared_waits_for_the_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replica = Replica(monkeypatch, tmp_path)
    for _ in range(100):
        replica.turn()
    assert replica.stage == "prepared"
    assert replica.swap.serving == "/models/fake"
    decide(tmp_path, NAME, "commit")
    replica.turn_until(lambda: replica.answer(replica.client))
    answer = replica.answer(replica.client)
    assert isinstance(answer, UpdateWeightReqOutput)
    assert (answer.new_version, replica.swap.serving) == (2, "/models/new")


def test_another_replica_says_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replica = Replica(monkeypatch, tmp_path)
    decide(tmp_path, NAME, "abort")
    replica.turn_until(lambda: replica.answer(replica.client))
    answer = replica.answer(replica.client)
    assert answer is not None
    assert "another replica does not take" in refusal(answer)[1]
    replica.check_old_serves()


def test_a_caller_who_leaves_first_is_a_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replica = Replica(monkeypatch, tmp_path)
    replica.transport.gone.add(replica.client)
    replica.turn_until(lambda: not replica.server.pending)
    assert decided(tmp_path, NAME) == "abort"
    replica.check_old_serves()


def test_a_caller_who_leaves_after_the_word_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may have been heard by another replica already."""
    replica = Replica(monkeypatch, tmp_path)
    replica.transport.gone.add(replica.client)
    monkeypatch.setattr("llmserve.runtime.scheduler.update.decided", lambda directory, name: None)  # not looked yet
    decide(tmp_path, NAME, "commit")
    replica.turn_until(lambda: not replica.server.pending)
    assert replica.swap.serving == "/models/new"
    assert replica.scheduler.weight_version == 2
    assert replica.scheduler.state == "ready"


def test_a_replica_that_cannot_follow_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replica = Replica(monkeypatch, tmp_path)
    ended: list[bool] = []
    monkeypatch.setattr("llmserve.runtime.scheduler.update.end_process", lambda: ended.append(True))
    replica.swap.fail_commit = MemoryError("no room")
    decide(tmp_path, NAME, "commit")
    replica.turn_until(lambda: ended)


def test_a_replica_that_fails_before_says_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replica = Updated(monkeypatch, directory=tmp_path, dp_size=2)
    assert refusal(replica.update("/missing/model", decision=NAME))[0] == "failed"
    assert decided(tmp_path, NAME) == "abort"


def test_one_of_several_replicas_is_not_updated_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Updated(monkeypatch, dp_size=2)
    assert "together or not at all" in refusal(replica.update())[1]
    assert refusal(replica.update(decision="../escape"))[0] == "invalid"
    replica.check_old_serves()


def test_the_last_of_several_replicas_is_updated_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replica = Updated(monkeypatch, directory=tmp_path, dp_size=3)
    record = InstanceRecord(name=tmp_path.name, rpc_addresses=("ipc:///0", "ipc:///2"), lost_replicas=(1,))
    (tmp_path / RECORD).write_bytes(msgspec.json.encode(record))
    assert "together or not at all" in refusal(replica.update())[1]
    record = msgspec.structs.replace(record, rpc_addresses=("ipc:///0",), lost_replicas=(1, 2))
    (tmp_path / RECORD).write_bytes(msgspec.json.encode(record))
    assert isinstance(replica.update(), UpdateWeightReqOutput)
    assert replica.swap.serving == "/models/new"
