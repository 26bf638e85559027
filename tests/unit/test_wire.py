"""The wire: round trips, sockets that never block, and what happens when somebody sends what nobody should."""

import asyncio
import contextlib
import os
import pickle
import random
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from instances import PATIENCE_S, fair_time, wait_until
from llmserve.runtime.messages import (
    AbortReqInput,
    AnyMessage,
    BatchTokenIDOutput,
    ControlReqInput,
    DetokenizerInput,
    FinishReason,
    Histogram,
    HttpMetrics,
    PingReqInput,
    RpcEnvelope,
    SchedulerInput,
    TokenIDRow,
    TokenizedEmbeddingReqInput,
)
from llmserve.runtime.wire import (
    MAX_FRAME_BYTES,
    MAX_RPC_OPCODES,
    Dealer,
    Poller,
    Pull,
    Push,
    Router,
    WireError,
    decode,
    encode,
)
from wire_attacks import bad_pickles, huge_frame, many_parts, one_frame, send_all, zmtp_connection

GOOD = AbortReqInput(rids=("good",))
SAFE_GROWTH = 150 << 20
"""Bytes that an attack may take for a moment: less than three frames of the largest size."""


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/a.sock"


def row(rid: str, ids: bytes = b"\x01\0\0\0", total: int = 1, finish: FinishReason | None = None) -> TokenIDRow:
    return TokenIDRow(
        rid=rid,
        index=0,
        output_ids=ids,
        prompt_tokens=123,
        cached_tokens=64,
        completion_tokens=total,
        finish=finish,
        queue_s=0.0123,
    )


def receive(pull: Pull, timeout_s: float = PATIENCE_S) -> object:
    """The next message, or None."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        Poller(pull).wait(0.05)
        message = pull.recv()
        if message is not None:
            return message
    return None


def receive_request(router: Router) -> tuple[bytes, RpcEnvelope]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        Poller(router).wait(0.05)
        request = router.recv()
        if request is not None:
            return request
    raise TimeoutError


def assert_serves(pull: Pull) -> None:
    """The next message that arrives is the good one that we send."""
    push = Push(pull.address)
    push.send(GOOD)
    assert receive(pull) == GOOD
    push.close()


def make_http_metrics() -> HttpMetrics:
    histogram = Histogram(bounds=(1.0,), counts=(0, 0), sum=0.0)
    return HttpMetrics(time=0.0, outcomes={}, ttft=histogram, e2e=histogram, queue=histogram)


def memory(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


@contextlib.contextmanager
def flat_memory(limit: int = SAFE_GROWTH) -> Iterator[None]:
    """Fails when the process takes more than `limit` bytes at any moment inside."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM, the peak, to the present
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < limit


# ---- the format ----------------------------------------------------------------------------------------------------


def test_a_frame_is_a_pickle_of_builtins() -> None:
    data = pickle.loads(encode(BatchTokenIDOutput(rows=(row("a"),))))
    assert data["type"] == "BatchTokenIDOutput"
    assert list(data["rows"][0][:6]) == ["a", 0, b"\x01\0\0\0", 123, 64, 1]


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65_535, 65_536, 1 << 20])
def test_texts_and_bytes_of_any_length_pass(length: int) -> None:
    message = TokenizedEmbeddingReqInput(
        rid="é" * (length // 2), prompts=(b"r" * length, b"\x94.p9\n" * (length // 5)), text="x" * length
    )
    assert decode(encode(message), SchedulerInput) == message


@pytest.mark.parametrize("number", [0, 255, 256, 65_535, 65_536, -1, 2**31 - 1, -(2**31), 2**31, 2**63 - 1])
def test_numbers_of_any_size_pass(number: int) -> None:
    message = BatchTokenIDOutput(rows=(row("a", total=number),))
    assert decode(encode(message), DetokenizerInput) == message


def test_a_message_that_may_not_come_here_is_refused() -> None:
    with pytest.raises(WireError, match="not expected here"):
        decode(encode(BatchTokenIDOutput(rows=())), SchedulerInput)


def test_a_message_above_the_limit_is_refused_by_the_sender() -> None:
    with pytest.raises(WireError, match="limit"):
        encode(TokenizedEmbeddingReqInput(rid="a", prompts=(bytes(MAX_FRAME_BYTES),)))


def test_an_error_holds_nothing_of_the_frame() -> None:
    with pytest.raises(WireError) as caught:
        decode(pickle.dumps({"type": "AbortReqInput", "rids": "secret"}, 5))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_encoding_costs_at_most_twice_a_pickle_of_dicts() -> None:
    rows = tuple(row(f"cmpl-{i:032x}", finish=FinishReason(type="length") if i % 16 == 0 else None) for i in range(256))
    message = BatchTokenIDOutput(rows=rows)
    plain = {
        "type": "BatchTokenIDOutput",
        "rows": [
            {**msgspec.structs.asdict(r), "finish": msgspec.structs.asdict(r.finish) if r.finish else None}
            for r in rows
        ],
    }

    def ours() -> None:
        assert decode(encode(message), DetokenizerInput)

    def dicts() -> None:
        assert pickle.loads(pickle.dumps(plain, 5))

    def seconds(work: object) -> float:
        began = time.thread_time()
        for _ in range(5):
            work()  # type: ignore[operator]
        return time.thread_time() - began

    # In turn and the least of each, so that what else the machine does is not what is measured.
    pairs = [(seconds(ours), seconds(dicts)) for _ in range(60)]
    assert min(a for a, _ in pairs) <= 2 * min(b for _, b in pairs)


# ---- attacks -------------------------------------------------------------------------------------------------------

ATTACKS = bad_pickles("/nonexistent")


@pytest.mark.parametrize("name", ATTACKS)
def test_a_bad_pickle_is_refused(name: str) -> None:
    with flat_memory(), pytest.raises(WireError):
        decode(ATTACKS[name])


def test_no_pickle_runs_code(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    attacks = bad_pickles(str(canary))
    for frame in attacks.values():
        with pytest.raises(WireError):
            decode(frame, AnyMessage)
    assert not canary.exists()
    # The test can fail: the plain unpickler does run it.
    pickle.loads(attacks["a dotted global"])
    assert canary.exists()


def test_a_receiver_lives_through_every_bad_pickle(address: str) -> None:
    pull, push = Pull(address, ControlReqInput), Push(address)
    for count, frame in enumerate(ATTACKS.values(), start=1):
        push._send(frame)
        push.send(GOOD)
        assert receive(pull) == GOOD
        assert pull.bad_frames == count
    push.close()
    pull.close()


def test_parts_too_many_are_dropped(address: str) -> None:
    pull = Pull(address, ControlReqInput)
    with zmtp_connection(address, b"PUSH") as attacker, flat_memory():
        assert send_all(attacker, many_parts(100_000))
        Poller(pull).wait(PATIENCE_S)
        assert pull.recv() is None
        assert pull.bad_frames == 0  # it gave up for now, so that the caller can go on with other work
        wait_until(lambda: all(pull.recv() is None for _ in range(100)) and pull.bad_frames == 1, PATIENCE_S, "its end")
        assert_serves(pull)
    pull.close()


def test_a_frame_of_a_gigabyte_is_cut_off(address: str) -> None:
    pull = Pull(address, ControlReqInput)
    with zmtp_connection(address, b"PUSH") as attacker, flat_memory():
        assert not send_all(attacker, huge_frame(1 << 30))
        assert_serves(pull)
    pull.close()


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(1000), b"\xff" * 1000, random.Random(0).randbytes(5000)],
    ids=["http", "zeros", "ones", "noise"],
)
def test_bytes_of_another_protocol_change_nothing(address: str, noise: bytes) -> None:
    pull = Pull(address, ControlReqInput)
    with socket.socket(socket.AF_UNIX) as attacker, flat_memory():
        attacker.connect(address.removeprefix("ipc://"))
        send_all(attacker, iter([noise]))
        assert_serves(pull)
    pull.close()


@pytest.mark.parametrize("parts", [[b"x"], [b"", b"x"], [b"a", b"b", b"c"], [b"x"] * 1000])
def test_a_router_lives_through_bad_envelopes(address: str, parts: list[bytes]) -> None:
    router, dealer = Router(address), Dealer(address)
    dealer._send(*parts)
    envelope = RpcEnvelope(protocol=1, call_id="a", timeout_s=1.0, body=encode(PingReqInput()))
    assert dealer.send(envelope)
    client, request = receive_request(router)
    assert request == envelope
    assert router.bad_frames == 1
    assert router.send(client, envelope)
    assert dealer.recv(PATIENCE_S) == envelope
    dealer.close()
    router.close()


def test_a_request_of_many_objects_is_refused_before_they_are_made(address: str) -> None:
    """A megabyte of empty lists would take a fifth of a second to make."""
    router, dealer = Router(address), Dealer(address)
    dealer._send(pickle.PROTO + b"\x05(" + b"]" * 1_000_000 + b"t.")
    wait_until(lambda: router.recv() is None and router.bad_frames == 1, PATIENCE_S, "the frame")
    dealer.close()
    router.close()
    names = tuple(f"{number:040}" for number in range(2000))
    assert decode(encode(AbortReqInput(rids=names)), ControlReqInput, MAX_RPC_OPCODES) == AbortReqInput(rids=names)
    with pytest.raises(WireError, match="too many objects"):
        decode(encode(AbortReqInput(rids=names * 10)), ControlReqInput, MAX_RPC_OPCODES)


def test_bad_frames_are_logged_without_contents_and_not_one_by_one(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    pull, push = Pull(address, ControlReqInput), Push(address)
    for _ in range(1000):
        push._send(pickle.dumps({"type": "AbortReqInput", "rids": "secret"}, 5))
    wait_until(lambda: pull.recv() is None and pull.bad_frames == 1000, PATIENCE_S, "the frames")
    assert [record.args[1] for record in caplog.records if record.args] == [2**i for i in range(10)]
    assert "secret" not in caplog.text
    push.close()
    pull.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("door_open", [False, True], ids=["mode", "filter"])
def test_another_user_is_refused(door_open: bool) -> None:
    """By the modes, and, were these open, by the uid filter."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/a.sock"
        pull = Pull(address, ControlReqInput)
        assert stat.S_IMODE(os.stat(f"{directory}/a.sock").st_mode) == 0o600
        if door_open:
            os.chmod(directory, 0o755)
            os.chmod(f"{directory}/a.sock", 0o777)
        child = os.fork()
        if child == 0:
            os._exit(send_as_nobody(address))
        refused = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert refused == (CUT_OFF if door_open else PERMISSION_DENIED)
        assert_serves(pull)
        assert pull.bad_frames == 0
        pull.close()


PERMISSION_DENIED, CUT_OFF, DELIVERED = 10, 11, 12


def send_as_nobody(address: str) -> int:
    """Runs in a forked child."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        with zmtp_connection(address, b"PUSH") as connection:
            send_all(connection, one_frame(encode(GOOD)))
        return DELIVERED
    except PermissionError:
        return PERMISSION_DENIED
    except ConnectionError:
        return CUT_OFF


# ---- channels ------------------------------------------------------------------------------------------------------


def test_what_is_sent_before_the_other_end_binds_arrives(address: str) -> None:
    push = Push(address)
    for number in range(10):
        push.send(AbortReqInput(rids=(str(number),)))
    time.sleep(0.1)
    pull = Pull(address, ControlReqInput)
    assert [receive(pull) for _ in range(10)] == [AbortReqInput(rids=(str(number),)) for number in range(10)]
    push.close()
    pull.close()


def test_a_push_finds_a_receiver_that_was_restarted(address: str) -> None:
    pull, push = Pull(address, ControlReqInput), Push(address)
    push.send(GOOD)
    assert receive(pull) == GOOD
    pull.close()
    os.unlink(address.removeprefix("ipc://"))
    pull = Pull(address, ControlReqInput)
    assert_serves(pull)

    def is_found() -> bool:
        push.send(PingReqInput())  # lost, while it has not noticed yet
        return receive(pull, 0.1) == PingReqInput()

    wait_until(is_found, PATIENCE_S, "a message")
    push.close()
    pull.close()


def test_a_slow_receiver_gets_everything_in_order_though_no_send_waited(address: str) -> None:
    push = Push(address, high_water=10, outbox=20)
    busy_s = time.thread_time()
    for number in range(2000):
        push.send(
            BatchTokenIDOutput(rows=(row("a", number.to_bytes(4, "little"), total=number + 1), row(f"b{number}")))
        )
        assert push.backlog <= 21
    assert push.congested
    assert time.thread_time() - busy_s < 2.0
    pull = Pull(address, DetokenizerInput)
    ids, total, others = b"", 0, []
    while len(others) < 2000:
        message = receive(pull)
        push.flush()
        assert isinstance(message, BatchTokenIDOutput)
        for got in message.rows:
            if got.rid == "a":
                ids += got.output_ids
                assert got.completion_tokens > total
                total = got.completion_tokens
            else:
                others.append(got.rid)
    assert ids == b"".join(number.to_bytes(4, "little") for number in range(2000))
    assert total == 2000
    assert others == [f"b{number}" for number in range(2000)]
    assert push.flush()
    assert not push.congested
    push.close()
    pull.close()


def test_an_offer_is_dropped_and_counted_when_nobody_takes_it(address: str) -> None:
    push = Push(address, high_water=5)
    metrics = make_http_metrics()
    taken = sum(push.offer(metrics) for _ in range(100))
    assert (taken, push.dropped, push.backlog) == (5, 95, 0)
    push.close()


def test_rows_that_are_too_large_together_travel_apart(address: str) -> None:
    pull, push = Pull(address, DetokenizerInput), Push(address)
    ids = bytes(30 << 20)
    push.send(BatchTokenIDOutput(rows=tuple(row(rid, ids) for rid in "abcd")))
    received: list[str] = []
    while len(received) < 4:
        push.flush()
        message = receive(pull)
        assert isinstance(message, BatchTokenIDOutput)
        received += [got.rid for got in message.rows]
    assert received == list("abcd")
    push.close()
    pull.close()


def test_one_row_that_is_too_large_is_an_error_and_blocks_nothing(address: str) -> None:
    pull, push = Pull(address, DetokenizerInput), Push(address)
    with pytest.raises(WireError):
        push.send(BatchTokenIDOutput(rows=(row("a", bytes(65 << 20)),)))
    push.send(BatchTokenIDOutput(rows=(row("b"),)))
    assert receive(pull) == BatchTokenIDOutput(rows=(row("b"),))
    push.close()
    pull.close()


async def test_arecv_waits_without_blocking_the_loop(address: str) -> None:
    pull, push = Pull(address, ControlReqInput), Push(address)
    waiting = asyncio.create_task(pull.arecv())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    push._send(b"bad")
    for number in range(500):
        push.send(AbortReqInput(rids=(str(number),)))
    assert await asyncio.wait_for(waiting, PATIENCE_S) == AbortReqInput(rids=("0",))
    for number in range(1, 500):
        assert await asyncio.wait_for(pull.arecv(), PATIENCE_S) == AbortReqInput(rids=(str(number),))
    assert pull.bad_frames == 1
    push.close()
    pull.close()


async def test_arecv_finds_the_good_message_behind_many_bad_ones(address: str) -> None:
    pull, push = Pull(address, ControlReqInput), Push(address)
    for _ in range(300):
        push._send(b"bad")
    push.send(GOOD)
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(pull.arecv(), PATIENCE_S) == GOOD
    push.close()
    pull.close()


def test_a_router_drops_answers_that_nobody_reads_instead_of_waiting(address: str) -> None:
    router, dealer = Router(address), Dealer(address)
    envelope = RpcEnvelope(protocol=1, call_id="a", timeout_s=1.0, body=bytes(1 << 16))
    dealer.send(envelope)
    client, _ = receive_request(router)
    with flat_memory():
        began = fair_time()
        sent = sum(router.send(client, envelope) for _ in range(2000))
        assert fair_time() - began < 2.0
    assert 100 <= sent < 400  # both ends' marks, and what the kernel holds
    other = Dealer(address)
    assert other.send(envelope)
    assert receive_request(router)[1] == envelope
    dealer.close()
    wait_until(lambda: not router.send(client, envelope), PATIENCE_S, "word of the end")
    other.close()
    router.close()


def test_a_poller_returns_as_soon_as_any_socket_is_readable(tmp_path: Path) -> None:
    first, second = (Pull(f"ipc://{tmp_path}/{name}", ControlReqInput) for name in "ab")
    push = Push(second.address)
    began = time.monotonic()
    Poller(first, second).wait(0.1)
    assert time.monotonic() - began > 0.09  # ZeroMQ counts milliseconds
    push.send(GOOD)
    began = fair_time()
    Poller(first, second).wait(PATIENCE_S)
    assert fair_time() - began < 5.0
    assert second.recv() == GOOD
    for each in (first, second, push):
        each.close()


@pytest.mark.parametrize("kind", [Push, lambda address: Pull(address, PingReqInput), Router, Dealer])
def test_every_socket_is_bounded_and_holds_no_exit_up(tmp_path: Path, kind: Callable[[str], Any]) -> None:
    socket = kind(f"ipc://{tmp_path}/any.sock")
    options = socket._socket
    assert 0 < options.getsockopt(zmq.SNDHWM) <= 1000
    assert 0 < options.getsockopt(zmq.RCVHWM) <= 1000
    assert 0 < options.getsockopt(zmq.MAXMSGSIZE) <= MAX_FRAME_BYTES
    assert options.getsockopt(zmq.LINGER) == 0
    socket.close()
