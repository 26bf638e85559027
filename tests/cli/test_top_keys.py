"""What keys do to the Ui, and what they ask for."""

import msgspec
import pytest
from top_samples import START, samples

from llmserve.cli.top.keys import Abort, Flush, KeyReader, Quit, Ui
from llmserve.cli.top.model import Model
from llmserve.cli.top.snapshot import Snapshot

A, B, EVIL, LONG = ("cmpl-a", 0, 0), ("cmpl-b", 1, 0), ("evil\x1b[2J\x07", 0, 0), ("長い名前のリクエスト", 0, 0)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    model = Model()
    for sample in samples(20):
        model.add(sample)
    return model.snapshot(START + 20)


def press(ui: Ui, snapshot: Snapshot, *keys: str) -> object:
    """Presses the keys and returns what the last one asked for."""
    action = None
    for key in keys:
        action = ui.press(key, snapshot)
    return action


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"jk", ["j", "k"]),
        (b"\x1b[A\x1b[B\x1bOC\x1b[D", ["up", "down", "right", "left"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[F\x1b[3~", ["pgup", "pgdn", "home", "end", "delete"]),
        (b"\r\x7f\t \x03", ["enter", "backspace", "tab", " ", "quit"]),
        ("é長".encode(), ["é", "長"]),
        (b"\x1b[1;5Aq", ["unknown", "q"]),
        (b"\x1bx", ["alt-x"]),
        (b"\xff\xfeq", ["q"]),
    ],
)
def test_bytes_become_keys(data: bytes, keys: list[str]) -> None:
    assert KeyReader().feed(data) == keys


def test_a_sequence_may_come_in_pieces() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.feed(b"[") == []
    assert reader.feed(b"Aj") == ["up", "j"]


def test_a_lone_escape_is_the_key() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.flush() == ["esc"]
    assert reader.flush() == []


@pytest.mark.parametrize(("down", "up"), [("j", "k"), ("down", "up")])
def test_moving_stops_at_the_ends(snapshot: Snapshot, down: str, up: str) -> None:
    ui = Ui()
    press(ui, snapshot, down)
    assert ui.chosen == B
    press(ui, snapshot, *[down] * 9)
    assert ui.chosen == LONG
    press(ui, snapshot, *[up] * 9)
    assert ui.chosen == A
    press(ui, snapshot, "G")
    assert ui.chosen == LONG
    press(ui, snapshot, "g")
    assert ui.chosen == A


def test_sorting(snapshot: Snapshot) -> None:
    ui = Ui()
    rids = lambda: [row.rid for row in ui.rows(snapshot)]  # noqa: E731
    assert rids() == ["cmpl-a", "cmpl-b", EVIL[0], LONG[0]]  # the oldest first
    press(ui, snapshot, "r")
    assert rids()[0] == LONG[0]
    press(ui, snapshot, "s")
    assert (ui.sort, ui.reverse) == ("PROMPT", False)
    assert rids()[0] == "cmpl-a"
    press(ui, snapshot, "h", "left")
    assert (ui.sort, ui.message) == ("STATE", "sorted by STATE")
    assert [row.state for row in ui.rows(snapshot)] == ["decode", "decode", "prefill", "waiting"]


def test_the_replica_is_a_column_where_there_are_several(snapshot: Snapshot) -> None:
    ui = Ui()
    two = msgspec.structs.replace(snapshot, replicas=snapshot.replicas * 2)
    moved = tuple(
        msgspec.structs.replace(request, dp_rank=place % 2) for place, request in enumerate(snapshot.requests)
    )
    two = msgspec.structs.replace(two, requests=moved)
    press(ui, two, "left")
    assert ui.sort == "REPLICA"
    assert [row.dp_rank for row in ui.rows(two)] == [0, 0, 1, 1]
    press(ui, two, "r")
    assert [row.dp_rank for row in ui.rows(two)] == [1, 1, 0, 0]
    press(ui, snapshot, "s")  # after a restart with one replica
    assert ui.sort == "STATE"


def test_filter_is_edited_kept_and_cleared(snapshot: Snapshot) -> None:
    ui = Ui()
    press(ui, snapshot, "/", *"ANNx", "backspace")
    assert [row.rid for row in ui.rows(snapshot)] == ["cmpl-a"]  # by user, whatever the case
    assert press(ui, snapshot, "q") is None  # a letter, while editing
    press(ui, snapshot, "backspace", "enter")
    assert (ui.mode, ui.wanted) == ("list", "ANN")
    press(ui, snapshot, "esc")
    assert len(ui.rows(snapshot)) == 4


def test_abort_asks_first_and_names_the_chosen_one(snapshot: Snapshot) -> None:
    ui = Ui()
    assert press(ui, snapshot, "j", "a") is None
    assert (ui.mode, ui.asked) == ("confirm", Abort(("cmpl-b",)))
    assert press(ui, snapshot, "n") is None
    assert ui.message == "nothing was aborted"
    assert press(ui, snapshot, "a", "y") == Abort(("cmpl-b",))
    assert ui.mode == "list"


def test_abort_takes_the_tagged_ones(snapshot: Snapshot) -> None:
    ui = Ui()
    assert press(ui, snapshot, " ", " ", "x", "y") == Abort(("cmpl-a", "cmpl-b"))
    assert not ui.tagged
    press(ui, snapshot, "g", " ", "u", "G", "delete")
    assert ui.asked == Abort((LONG[0],))


def test_a_tag_out_of_sight_is_not_aborted(snapshot: Snapshot) -> None:
    ui = Ui()
    press(ui, snapshot, " ", "/", *"bob", "enter", "a")
    assert ui.asked == Abort(("cmpl-b",))


def test_flush_and_quit(snapshot: Snapshot) -> None:
    ui = Ui()
    assert isinstance(press(ui, snapshot, "f"), Flush)
    assert ui.message == "flushing"  # until it is told how it ended
    assert isinstance(press(Ui(), snapshot, "q"), Quit)
    assert isinstance(press(Ui(mode="confirm"), snapshot, "quit"), Quit)


@pytest.mark.parametrize("keys", ["f", "a", "x"])
def test_readonly_does_nothing(snapshot: Snapshot, keys: str) -> None:
    ui = Ui(readonly=True)
    assert press(ui, snapshot, keys) is None
    assert ui.mode == "list"
    assert "read-only" in ui.message


def test_detail_help_zoom_pause_and_interval(snapshot: Snapshot) -> None:
    ui = Ui()
    press(ui, snapshot, "j", "enter")
    assert (ui.mode, ui.chosen) == ("detail", B)
    assert press(ui, snapshot, "q") is None
    press(ui, snapshot, "?")
    assert ui.mode == "help"
    press(ui, snapshot, "esc", "p", "z")
    assert (ui.mode, ui.paused, ui.zoomed) == ("list", True, True)
    press(ui, snapshot, "p", "-", "z")
    assert (ui.paused, ui.interval, ui.zoomed) == (False, 2.0, False)
    press(ui, snapshot, *"+" * 9)
    assert ui.interval == 0.2


def test_the_choice_follows_its_request(snapshot: Snapshot) -> None:
    ui = Ui()
    press(ui, snapshot, "j", "r")
    assert ui.rows(snapshot)[ui.place(ui.rows(snapshot))].rid == "cmpl-b"
    assert ui.place([]) == 0
