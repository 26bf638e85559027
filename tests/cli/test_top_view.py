"""What `top` draws, as text, at several sizes."""

import itertools

import msgspec
import pytest
from rich.cells import cell_len
from top_samples import SECONDS, START, samples

from llmserve.cli.top.glyphs import ASCII, UNICODE, Glyphs
from llmserve.cli.top.keys import Abort, Ui
from llmserve.cli.top.model import Model
from llmserve.cli.top.snapshot import Gpu, Process, Replica, Snapshot
from llmserve.cli.top.spans import text_of
from llmserve.cli.top.view import render

SIZES = [(20, 5), (30, 8), (40, 10), (80, 24), (99, 30), (100, 20), (120, 40), (200, 50), (300, 80)]


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    model = Model()
    for sample in samples():
        model.add(sample)
    return model.snapshot(START + SECONDS + 0.4)


def drawn(snapshot: Snapshot, width: int, height: int, ui: Ui | None = None, glyphs: Glyphs = UNICODE) -> str:
    return text_of(render(snapshot, ui or Ui(), width, height, glyphs))


@pytest.mark.parametrize("size", [*SIZES, (1, 1), (5, 2), (12, 3)])
@pytest.mark.parametrize("mode", ["list", "detail", "help", "filter", "confirm"])
def test_it_is_never_larger_than_the_screen(snapshot: Snapshot, size: tuple[int, int], mode: str) -> None:
    ui = Ui(mode=mode, asked=Abort(("cmpl-a", "cmpl-b")), wanted="cmpl", chosen=("cmpl-a", 0, 0))
    lines = render(snapshot, ui, *size)
    assert len(lines) == size[1]
    assert max(sum(cell_len(text) for text, _ in line) for line in lines) <= size[0]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_shows_the_state_the_load_and_the_oldest_request(snapshot: Snapshot, size: tuple[int, int]) -> None:
    text = drawn(snapshot, *size)
    assert text.startswith("● ready  prod")
    assert "run" in text
    assert "25%" in text
    assert "▸ cmpl-a" in text


@pytest.mark.parametrize("size", SIZES)
def test_control_characters_are_shown_not_sent(snapshot: Snapshot, size: tuple[int, int]) -> None:
    assert not any(ord(character) < 32 for character in drawn(snapshot, *size).replace("\n", ""))


@pytest.mark.parametrize("size", SIZES)
def test_ascii_is_ascii(snapshot: Snapshot, size: tuple[int, int]) -> None:
    plain = msgspec.structs.replace(snapshot, requests=snapshot.requests[:2])
    for mode in ("list", "detail", "help"):
        ui = Ui(mode=mode, chosen=("cmpl-a", 0, 0))
        assert drawn(plain, *size, ui=ui, glyphs=ASCII).isascii()


def test_80_by_24(snapshot: Snapshot) -> None:
    """The whole picture on the usual terminal, title rules and curves left out."""
    lines = drawn(snapshot, 80, 24).splitlines()
    words = [" ".join(itertools.takewhile(lambda word: word[0] not in "─█▁", line.split())) for line in lines]
    assert words[:3] == [
        "● ready prod SmolLM2-135M weights v3 up 18m40s data 400ms old",
        "Load step 50ms ▲ prefill busy",
        "running 3/64",
    ]
    assert words[4:7] == ["prefill 50 tok/s", "decode 100 tok/s", "requests 2.0/s"]
    assert "used 2.5k (25%) cached 5.0k free 2.5k" in words
    assert "hit rate 80% last minute, 40% since the start" in words
    assert "evicted 10/s (1.2k) retracted ▲ 2/min (4, 12 asked for)" in words
    assert "p50/p95 ttft 550ms/955ms itl 550ms/955ms e2e 550ms/955ms queue 550ms/955ms" in words
    table = words.index("RID STATE AGE▼ PROMPT CACHED OUTPUT TOK/S")
    assert words[table + 1] == "▸ cmpl-a decode 2m00s 2.0k 64 120/200 12.5"
    assert words[table + 3].startswith("evil␛[2J␇ prefill")
    assert words[-1] == "q quit ? help a abort f flush / filter s sort Space tag Enter detail"


LONG_MODEL = "an-organization/A-Model-With-A-Very-Long-Name-That-Nobody-Reads-7B-Instruct-Q4_0.gguf"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("state", "reason"), [("ready", ""), ("stalled", "the scheduler has said nothing for 5 s")])
def test_a_long_name_hides_neither_state_nor_age(
    snapshot: Snapshot, size: tuple[int, int], state: str, reason: str
) -> None:
    named = msgspec.structs.replace(
        snapshot, instance="an-instance-with-a-name", model=LONG_MODEL, state=state, reason=reason
    )
    first = drawn(named, *size).splitlines()[0]
    assert f" {state}" in first
    assert first.endswith("400ms" if size[0] < 60 else "data 400ms old")
    if size[0] >= 80:
        assert reason in first


def test_names_are_elided_in_their_middle(snapshot: Snapshot) -> None:
    named = msgspec.structs.replace(snapshot, model=LONG_MODEL)
    assert drawn(named, 80, 24).splitlines()[0] == (
        "● ready  prod  an-organizati…ct-Q4_0.gguf  weights v3  up 18m40s  data 400ms old"
    )
    assert LONG_MODEL in drawn(named, 200, 50).splitlines()[0]
    wide = msgspec.structs.replace(snapshot, instance="長い名前のインスタンス" * 5)
    first = drawn(wide, 80, 24).splitlines()[0]
    assert first.startswith("● ready  長い名前")
    assert first.endswith("data 400ms old")


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 50)])
def test_why_requests_wait_is_said(snapshot: Snapshot, size: tuple[int, int]) -> None:
    waiting = msgspec.structs.replace(snapshot.load, waiting=7, obstacle="all 64 places taken")
    assert "▲ all 64 places taken" in drawn(msgspec.structs.replace(snapshot, load=waiting), *size)


def test_zoomed_the_requests_have_the_screen(snapshot: Snapshot) -> None:
    lines = drawn(snapshot, 80, 24, Ui(zoomed=True)).splitlines()
    assert lines[1].startswith("run 3 wait 1")
    assert lines[2].startswith("Requests 4")
    assert lines[4].startswith("▸ cmpl-a")


def test_only_retractions_that_nobody_asked_for_alert(snapshot: Snapshot) -> None:
    calm = msgspec.structs.replace(snapshot.cache, retractions_last_minute=0)
    free = msgspec.structs.replace(snapshot.load, obstacle="")
    text = drawn(msgspec.structs.replace(snapshot, cache=calm, load=free), 80, 24)
    assert "retracted 0/min (4, 12 asked for)" in text
    assert "▲" not in text


@pytest.mark.parametrize("size", SIZES)
def test_before_the_first_numbers_none_are_shown(size: tuple[int, int]) -> None:
    text = drawn(Model().snapshot(START), *size)
    assert text.startswith("◌ connecting")
    assert "v0" not in text
    assert "0/s" not in text


def test_wide_shows_processes_beside_latencies(snapshot: Snapshot) -> None:
    text = drawn(snapshot, 120, 30)
    assert any("Latency" in line and "Processes" in line for line in text.splitlines())
    assert any(line.endswith("main            100 80.0 MiB   12% 400ms    5") for line in text.splitlines())
    assert "12.0 GiB of 139 GiB, 45% busy" in text
    assert text.splitlines()[0].endswith("data 400ms old")


def test_the_bar_shows_the_parts_of_the_pool(snapshot: Snapshot) -> None:
    bar = drawn(snapshot, 80, 24).splitlines()[8]
    assert (bar.count("█"), bar.count("▒"), bar.count("·")) == (18, 35, 17)


def test_severity_is_said_in_words(snapshot: Snapshot) -> None:
    cache = msgspec.structs.replace(snapshot.cache, used=9_500)
    bad = msgspec.structs.replace(
        snapshot,
        state="stalled",
        reason="no step for 6 s",
        data_age_s=9.0,
        cache=cache,
        processes=tuple(msgspec.structs.replace(p, heartbeat_age_s=9.0) for p in snapshot.processes),
    )
    text = drawn(bad, 120, 40)
    assert text.startswith("▲ stalled  no step for 6 s")
    assert "▲ data 9.0s old" in text
    assert "▲ high" in text
    assert text.count("▲ late") == 2


def test_the_chosen_row_stays_in_sight() -> None:
    model = Model()
    for sample in samples(5):
        model.add(sample)
    found = model.snapshot(START + 5)
    rows = [
        msgspec.structs.replace(found.requests[0], rid=f"r{number:03}", age_s=500.0 - number) for number in range(200)
    ]
    crowded = msgspec.structs.replace(found, requests=tuple(rows))
    for number in (0, 77, 199):
        text = drawn(crowded, 80, 24, Ui(chosen=(f"r{number:03}", 0, 0)))
        assert f"▸ r{number:03}" in text
    assert text.splitlines()[-2].startswith("▸ r199")


def test_detail_says_when_the_request_has_to_end(snapshot: Snapshot) -> None:
    text = drawn(snapshot, 80, 24, Ui(mode="detail", chosen=("cmpl-a", 0, 0)))
    assert "user         ann" in text
    assert "120 of at most 200 tokens" in text
    assert "in 6.4s at the latest" in text
    gone = drawn(snapshot, 80, 24, Ui(mode="detail", chosen=("gone", 0, 0)))
    assert "has ended" in gone


def test_abort_is_asked_with_the_rids(snapshot: Snapshot) -> None:
    ui = Ui(mode="confirm", asked=Abort(("cmpl-a", "evil\x1b[2J")))
    assert drawn(snapshot, 80, 24, ui).splitlines()[-1] == "abort 2 requests: cmpl-a, evil␛[2J [y/N]"
    many = Ui(mode="confirm", asked=Abort(tuple(f"cmpl-{number:04}" for number in range(50))))
    assert drawn(snapshot, 80, 24, many).splitlines()[-1].endswith("… [y/N]")


def test_readonly_offers_no_action(snapshot: Snapshot) -> None:
    for mode in ("list", "help"):
        text = drawn(snapshot, 120, 30, Ui(readonly=True, mode=mode))
        assert "abort" not in text
        assert "flush" not in text


def rank_of(snapshot: Snapshot, **place: int) -> Process:
    """A rank whose stage waits for a quarter of the time, or more in a later stage."""
    (alone,) = (process for process in snapshot.processes if process.role == "scheduler")
    return msgspec.structs.replace(alone, bubble=0.25 * (1 + place.get("pp_rank", 0)), **place)


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (200, 50)])
def test_ranks_and_stages_are_shown_with_how_long_they_wait(snapshot: Snapshot, size: tuple[int, int]) -> None:
    assert "wait heard" not in drawn(snapshot, 120, 40)
    ranks = tuple(rank_of(snapshot, pp_rank=stage, tp_rank=rank) for stage in (0, 1) for rank in (0, 1))
    text = drawn(msgspec.structs.replace(snapshot, processes=(snapshot.processes[0], *ranks)), *size)
    if size[0] < 100:  # no room for the processes
        assert "waits    pp0 tp0 25%  pp0 tp1 25%  pp1 tp0 50%  pp1 tp1 50%" in text
        return
    lines = [line.split("rank ")[1].split() for line in text.splitlines() if "rank pp" in line]
    assert [line[:2] for line in lines] == [["pp0", "tp0"], ["pp0", "tp1"], ["pp1", "tp0"], ["pp1", "tp1"]]
    assert [line[6] for line in lines] == ["25%", "25%", "50%", "50%"]
    assert all("…" not in line for line in text.splitlines()[:15])


def test_what_has_room_is_shown(snapshot: Snapshot) -> None:
    """On the usual terminal stages and a table of eight take the place of the pool's block, not of the load's too."""
    ranks = tuple(rank_of(snapshot, pp_rank=stage) for stage in (0, 1))
    full = msgspec.structs.replace(snapshot, processes=ranks, requests=snapshot.requests * 2)
    text = drawn(full, 80, 24)
    assert "decode     100 tok/s" in text
    assert "waits    pp0 25%  pp1 50%" in text
    assert text.count("cmpl-") == 4


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_replicas_are_shown_with_what_each_has_to_do(snapshot: Snapshot, size: tuple[int, int]) -> None:
    busy = Replica(dp_rank=0, state="ready", running=7, waiting=2, kv_used=90, kv_total=100, heartbeat_age_s=0.4)
    idle = msgspec.structs.replace(busy, dp_rank=1, running=0, waiting=0, kv_used=0, heartbeat_age_s=9.0)
    text = drawn(msgspec.structs.replace(snapshot, replicas=(busy, idle)), *size)
    assert "replicas dp0 ready run 7 wait 2 kv 90%  dp1 ▲ silent run 0 wait 0 kv 0%" in text
    lost = msgspec.structs.replace(idle, state="lost", kv_total=0)
    assert "dp1 ▲ lost run 0 wait 0 kv -" in drawn(msgspec.structs.replace(snapshot, replicas=(busy, lost)), *size)
    assert "2 replicas" in text.splitlines()[0]
    (row,) = (line for line in text.splitlines() if line.startswith("▸ cmpl-a"))
    assert row.split()[2:5] == ["decode", "0", "2m00s"]
    assert "REPLICA" in text
    assert "REPLICA" not in drawn(snapshot, *size)


def test_a_gpu_that_tells_nothing_is_shown_all_the_same(snapshot: Snapshot) -> None:
    mute = Gpu(index=3, name="GB10", used_bytes=None, total_bytes=None, busy_percent=None)
    assert "- of -, - busy  GB10" in drawn(msgspec.structs.replace(snapshot, gpus=(mute,)), 120, 40)
