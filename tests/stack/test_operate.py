"""The operators' verbs against a real instance under load, over its RPC socket: what clients see of them."""

import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_tiny
from instances import (
    FOREVER,
    LLMSERVE,
    PATIENCE_S,
    RunningInstance,
    environment_for,
    fair_time,
    launched,
    wait_until,
)
from llmserve.cli.top.live import Live
from llmserve.cli.top.source import Item
from llmserve.runtime.client import RpcCallError, RpcClient
from llmserve.runtime.instance import find_instance
from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    AbortReqInput,
    AbortReqOutput,
    ContinueGenerationReqInput,
    ControlReqInput,
    FlushCacheReqInput,
    GetLoadReqInput,
    GetStatusReqInput,
    HttpMetrics,
    ListRequestsReqInput,
    MetricsInput,
    PauseGenerationReqInput,
    PingReqInput,
    RpcEnvelope,
    RpcError,
    SchedulerMetrics,
    SubscribeMetricsReqInput,
    UpdateWeightReqInput,
)
from llmserve.runtime.ports import ipc_address
from llmserve.runtime.wire import Dealer, Pull, decode, encode

PROMPT = "Once upon a time there was a server that served"


class Operated:
    """An instance, its RPC, and requests to it with rids of the test's choice."""

    def __init__(self, instance: RunningInstance):
        self.instance = instance
        self.address = f"ipc://{instance.directory}/rpc.sock"
        self.rpc = RpcClient(self.address, PATIENCE_S)
        self._http = instance.client(timeout=PATIENCE_S)
        self._threads = ThreadPoolExecutor(16)

    def generate(self, rid: str, tokens: int, text: str = PROMPT, **fields: Any) -> "Future[httpx.Response]":
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"rid": rid, "text": text, "sampling_params": params, **fields}
        return self._threads.submit(self._http.post, "/generate", json=body)

    def start(self, *rids: str, tokens: int = FOREVER) -> "dict[str, Future[httpx.Response]]":
        """Long requests, all under way when it returns."""
        answers = {rid: self.generate(rid, tokens, f"{rid} {PROMPT}") for rid in rids}
        wait_until(lambda: set(rids) <= self.running(), PATIENCE_S, "the requests to run")
        return answers

    def running(self) -> set[str]:
        return {info.rid for info in self.rpc.call(ListRequestsReqInput()).requests if info.state == "decode"}

    def text(self, tokens: int = 12) -> str:
        """What the prompt continues with; tells the weights that serve."""
        answer = self.generate(f"text-{time.monotonic_ns()}", tokens).result(PATIENCE_S)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["text"]
        return text

    def cached_tokens(self) -> int:
        answer = self.generate(f"cached-{time.monotonic_ns()}", 1).result(PATIENCE_S).json()
        cached: int = answer["meta_info"]["cached_tokens"]
        return cached

    def flush_refusal(self) -> str:
        """Why the cache cannot be flushed now; empty when it has been."""
        try:
            self.rpc.call(FlushCacheReqInput())
        except RpcCallError as error:
            return error.message
        return ""

    def used(self) -> int:
        return self.rpc.call(GetLoadReqInput()).kv_tokens_used

    def clear(self) -> None:
        """Ends whatever a failed test has left."""
        self.rpc.call(ContinueGenerationReqInput())
        self.rpc.call(AbortReqInput(everything=True))


def finish(answer: "Future[httpx.Response]") -> str:
    response = answer.result(PATIENCE_S)
    assert response.status_code == 200, response.text
    reason: str = response.json()["meta_info"]["finish_reason"]["type"]
    return reason


@pytest.fixture(scope="module")
def instance(runtime_root: Path, long_model: Path) -> Iterator[RunningInstance]:
    options = ("--max-running-requests", "4", "--max-total-tokens", str(1 << 18))
    with launched(runtime_root, "operated", str(long_model), *options) as instance:
        yield instance


@pytest.fixture
def operated(instance: RunningInstance) -> Iterator[Operated]:
    operated = Operated(instance)
    operated.clear()
    yield operated
    operated.clear()
    operated.rpc.close()


# ---- abort ---------------------------------------------------------------------------------------------------------


def test_abort_of_running_queued_finished_and_unknown(operated: Operated) -> None:
    assert finish(operated.generate("finished", 3)) == "length"
    answers = operated.start("1", "10", "other", "last")
    queued = operated.generate("queued", 10)
    wait_until(lambda: operated.rpc.call(GetLoadReqInput()).waiting, PATIENCE_S, "one to wait")
    assert operated.rpc.call(AbortReqInput(rids=("queued", "finished", "unknown"))) == AbortReqOutput(
        aborted=("queued",), not_found=("finished", "unknown")
    )
    assert queued.result(PATIENCE_S).json()["meta_info"]["completion_tokens"] == 0
    assert operated.rpc.call(AbortReqInput(rids=("1",))) == AbortReqOutput(aborted=("1",))
    assert operated.rpc.call(AbortReqInput(rids=("1", ""))) == AbortReqOutput(aborted=(), not_found=("1", ""))
    assert operated.running() == {"10", "other", "last"}
    assert operated.rpc.call(AbortReqInput(prefix="1")) == AbortReqOutput(aborted=("10",))
    assert operated.running() == {"other", "last"}
    assert [finish(answer) for answer in (queued, answers["1"], answers["10"])] == ["abort"] * 3


def test_abort_of_everything_under_load_answers_when_the_memory_is_back(operated: Operated) -> None:
    answers = operated.start("a", "b", "c", "d")
    answers |= {f"more{i}": operated.generate(f"more{i}", 100) for i in range(8)}
    wait_until(lambda: operated.rpc.call(GetLoadReqInput()).waiting == 8, PATIENCE_S, "eight to wait")
    assert set(operated.rpc.call(AbortReqInput(everything=True)).aborted) == set(answers)
    assert operated.used() == 0
    assert {finish(answer) for answer in answers.values()} == {"abort"}
    assert operated.text()


# ---- flush and pause -----------------------------------------------------------------------------------------------


def test_a_flush_is_seen_in_cached_tokens(operated: Operated) -> None:
    operated.cached_tokens()
    assert operated.cached_tokens() > 0
    assert operated.rpc.call(FlushCacheReqInput()).pages_freed > 0
    assert operated.cached_tokens() == 0


def test_a_flush_while_busy_is_refused_or_waits_and_a_second_is_refused_meanwhile(operated: Operated) -> None:
    answers = operated.start("a", "b")
    with pytest.raises(RpcCallError, match="2 running, 0 waiting") as refused:
        operated.rpc.call(FlushCacheReqInput())
    assert refused.value.exit_code == 75
    with ThreadPoolExecutor(1) as thread, RpcClient(operated.address, PATIENCE_S) as other:
        waiting = thread.submit(other.call, FlushCacheReqInput(wait_s=PATIENCE_S))
        wait_until(lambda: "under way" in operated.flush_refusal(), PATIENCE_S, "a second flush to be refused")
        operated.rpc.call(AbortReqInput(rids=("a", "b")))
        assert waiting.result(PATIENCE_S).pages_freed > 0
    assert {finish(answer) for answer in answers.values()} == {"abort"}


def test_a_flush_that_aborts(operated: Operated) -> None:
    answers = operated.start("a", "b")
    assert set(operated.rpc.call(FlushCacheReqInput(abort=True)).aborted) == {"a", "b"}
    assert {finish(answer) for answer in answers.values()} == {"abort"}
    assert operated.rpc.call(GetLoadReqInput()).kv_tokens_cached == 0


def test_a_pause_that_retracts_frees_the_memory_and_loses_no_token(operated: Operated) -> None:
    alone = operated.generate("alone", 500).result(PATIENCE_S).json()["text"]
    for _ in range(20):  # as often as it takes to be in time
        answers = [operated.generate(f"r{i}", 500) for i in range(4)]
        wait_until(
            lambda of=answers: operated.running() or all(map(Future.done, of)), PATIENCE_S, "the requests to run"
        )
        retracted = operated.rpc.call(PauseGenerationReqInput(mode="retract")).retracted
        if retracted:
            break
        operated.rpc.call(ContinueGenerationReqInput())
        wait(answers)
    assert retracted
    assert operated.used() == 0
    operated.rpc.call(FlushCacheReqInput())
    assert httpx.get(f"{operated.instance.url}/health").status_code == 200
    step = operated.rpc.call(PingReqInput()).step
    late = operated.generate("late", 500)
    time.sleep(0.3)
    assert operated.rpc.call(PingReqInput()).step == step
    operated.rpc.call(ContinueGenerationReqInput())
    for answer in [*answers, late]:
        assert answer.result(PATIENCE_S).json()["text"] == alone


# ---- weights -------------------------------------------------------------------------------------------------------


@contextmanager
def changed(model: Path, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Iterator[Path]:
    """A copy of a checkpoint with its tensors changed."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    yield directory


def flip_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"].neg_()


def test_a_swap_under_load_changes_the_text_and_fails_no_request(
    operated: Operated, long_model: Path, tmp_path: Path
) -> None:
    before, version = operated.text(), operated.rpc.call(GetStatusReqInput()).weight_version
    with changed(long_model, tmp_path / "other", flip_head) as other:
        long = operated.start("a", "b")
        load = [operated.generate(f"load{i}", 30) for i in range(6)]
        answer = operated.rpc.call(UpdateWeightReqInput(model_path=str(other)))
        assert (answer.old_version, answer.new_version) == (version, version + 1)
        assert [finish(each) for each in load] == ["length"] * 6
        assert {"a", "b"} <= operated.running()
        operated.rpc.call(AbortReqInput(rids=("a", "b")))
        assert {finish(each) for each in long.values()} == {"abort"}
        after = operated.text()
        assert after != before
        status = operated.rpc.call(GetStatusReqInput())
        assert (status.weight_version, status.model) == (version + 1, str(other))
        operated.cached_tokens()
        assert operated.cached_tokens() > 0
        operated.rpc.call(UpdateWeightReqInput(model_path=str(long_model), mode="drain"))
        assert operated.cached_tokens() == 0  # nothing that the other weights computed is used
        assert operated.text() == before


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(7)


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def one_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def one_too_many(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.mlp.down_proj.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wrong_shape, "model.norm.weight"),
        (not_finite, "not finite"),
        (one_missing, "lm_head.weight: missing"),
        (one_too_many, "layers.9"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    operated: Operated,
    long_model: Path,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    says: str,
) -> None:
    before = operated.text(), operated.rpc.call(GetStatusReqInput()).weight_version
    with changed(long_model, tmp_path / "bad", change) as bad, pytest.raises(RpcCallError, match=says):
        operated.rpc.call(UpdateWeightReqInput(model_path=str(bad)))
    assert (operated.text(), operated.rpc.call(GetStatusReqInput()).weight_version) == before


def cut_short(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def only_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def a_link_out(directory: Path) -> None:
    outside = directory.parent / "outside.safetensors"
    (directory / "model.safetensors").rename(outside)
    (directory / "model.safetensors").symlink_to(outside)


def an_index_out(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "outside.safetensors")
    index = '{"weight_map": {"lm_head.weight": "../outside.safetensors"}}'
    (directory / "model.safetensors.index.json").write_text(index)


def another_model(directory: Path) -> None:
    shutil.rmtree(directory)
    make_tiny(directory, "qwen3", max_position_embeddings=1 << 16)


def another_tokenizer(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace('"<|im_end|>"', '"<|the_end|>"'))


@pytest.mark.parametrize(
    "damage", [cut_short, only_a_pickle, a_link_out, an_index_out, another_model, another_tokenizer, shutil.rmtree]
)
def test_a_damaged_or_foreign_checkpoint_changes_nothing(
    operated: Operated, long_model: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    before = operated.text(), operated.rpc.call(GetStatusReqInput()).weight_version
    bad = Path(shutil.copytree(long_model, tmp_path / "model"))
    damage(bad)
    with pytest.raises(RpcCallError) as refused:
        operated.rpc.call(UpdateWeightReqInput(model_path=str(bad)))
    assert refused.value.code == "failed"
    assert (operated.text(), operated.rpc.call(GetStatusReqInput()).weight_version) == before


def test_a_killed_update_leaves_the_old_weights_or_the_new_ones(
    operated: Operated, long_model: Path, tmp_path: Path
) -> None:
    old = operated.text()
    with changed(long_model, tmp_path / "other", flip_head) as other:
        operated.rpc.call(UpdateWeightReqInput(model_path=str(other)))
        new = operated.text()
        operated.rpc.call(UpdateWeightReqInput(model_path=str(long_model)))
        answers = operated.start("a", "b")
        for delay in (0.0, 0.02, 0.1):
            command = [LLMSERVE, "update-weights", str(other), "--instance", "operated"]
            client = subprocess.Popen(command, env=environment_for(operated.instance.root), stdout=subprocess.DEVNULL)
            wait_until(
                lambda client=client: client.poll() is not None or "update" in operated.flush_refusal(),
                PATIENCE_S,
                "a call",
            )
            time.sleep(delay)
            client.send_signal(signal.SIGKILL)
            client.wait()
            wait_until(lambda: "update" not in operated.flush_refusal(), PATIENCE_S, "the end of the update")
            serves = operated.rpc.call(GetStatusReqInput()).model
            assert operated.text() == (new if serves == str(other) else old)
        assert operated.running() == {"a", "b"}
        operated.rpc.call(AbortReqInput(everything=True))
        assert {finish(answer) for answer in answers.values()} == {"abort"}
        operated.rpc.call(UpdateWeightReqInput(model_path=str(long_model)))
    assert operated.text() == old


# ---- how long a call takes ------------------------------------------------------------------------------------------


def ping_s(operated: Operated) -> float:
    """The median round trip, at a pace that stays within what calls may take of the scheduler's time."""
    times = []
    for _ in range(20):
        time.sleep(0.02)
        began = fair_time()
        operated.rpc.call(PingReqInput())
        times.append(fair_time() - began)
    return statistics.median(times)


def test_a_ping_takes_under_a_millisecond_and_under_a_step_in_load(operated: Operated) -> None:
    """As often as it takes to find the machine quiet."""
    assert any(ping_s(operated) < 0.001 for _ in range(20))
    operated.start("a", "b", "c", "d")
    assert any(ping_s(operated) < 1 / steps_per_second(operated, 0.5) + 0.001 for _ in range(20))


# ---- clients that ask too much, or do not listen -------------------------------------------------------------------


def encode_call(request: ControlReqInput) -> bytes:
    return encode(RpcEnvelope(protocol=PROTOCOL_VERSION, call_id="flood", timeout_s=10.0, body=encode(request)))


def steps_per_second(operated: Operated, seconds: float) -> float:
    first, began = operated.rpc.call(PingReqInput()).step, time.monotonic()
    time.sleep(seconds)
    return (operated.rpc.call(PingReqInput()).step - first) / (time.monotonic() - began)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(encode_call(ListRequestsReqInput()), id="calls"),
        pytest.param(b"not a pickle", id="garbage"),
        pytest.param(b"\x80\x05(" + b"]" * 1_000_000 + b"t.", id="a megabyte of empty lists"),
    ],
)
def test_a_flood_slows_nobody_down(operated: Operated, frame: bytes) -> None:
    """Up to 10,000 frames a second. Windows with and without it come in pairs, as many as it takes for a fair one."""
    answers = operated.start("a", "b")
    flooding, ended = threading.Event(), threading.Event()
    sent = 0

    def flood() -> None:
        nonlocal sent
        dealer = Dealer(operated.address)
        while not ended.wait(0.01):
            if flooding.is_set():
                sent += sum(dealer._send(frame) for _ in range(100))
            while dealer.recv(0.0) is not None:
                pass
        dealer.close()

    flooder = threading.Thread(target=flood)
    flooder.start()
    shares = []
    while len(shares) < 12 and max(shares, default=0.0) < 0.7:
        quiet = steps_per_second(operated, 0.4)
        flooding.set()
        shares.append(steps_per_second(operated, 0.4) / max(quiet, 1.0))  # none at all where others have the cores
        flooding.clear()
    ended.set()
    flooder.join()
    assert sent > 50  # all that it takes: frames wait in the socket for their share of the time
    assert max(shares) >= 0.7
    assert operated.running() == {"a", "b"}
    operated.rpc.call(AbortReqInput(everything=True))
    assert {finish(answer) for answer in answers.values()} == {"abort"}


def test_a_caller_of_another_version_is_told_so(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("llmserve.runtime.client.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
        with pytest.raises(RpcCallError) as refused:
            operated.rpc.call(AbortReqInput(everything=True))
    assert refused.value.exit_code == 76
    dealer = Dealer(operated.address)
    dealer.send(RpcEnvelope(protocol=PROTOCOL_VERSION + 1, call_id="new", timeout_s=1.0, body=b"of a later format"))
    answer = dealer.recv(PATIENCE_S)
    dealer.close()
    assert answer is not None
    assert decode(answer.body, RpcError).code == "protocol"
    assert operated.rpc.call(PingReqInput()).state == "ready"


def test_a_client_that_never_reads_takes_no_memory_and_no_time(operated: Operated) -> None:
    scheduler = operated.instance.child("scheduler")
    dealer = Dealer(operated.address)
    envelope = RpcEnvelope(protocol=PROTOCOL_VERSION, call_id="deaf", timeout_s=10.0, body=encode(GetStatusReqInput()))
    before = scheduler.memory_info().rss
    sent = 0

    def all_sent() -> bool:
        nonlocal sent
        sent += sum(dealer.send(envelope) for _ in range(20))
        return sent >= 400

    wait_until(all_sent, PATIENCE_S, "the calls' turn")
    assert operated.text()
    assert operated.rpc.call(PingReqInput()).state == "ready"
    assert scheduler.memory_info().rss - before < 30 << 20
    dealer.close()


def test_watchers_hear_of_the_scheduler_and_the_front_and_a_deaf_one_delays_nobody(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(operated.instance.root))
    record = find_instance("operated")
    deaf = Pull(ipc_address(record.directory / "watch-deaf"), MetricsInput)
    operated.rpc.call(SubscribeMetricsReqInput(endpoint="watch-deaf"))
    watch = Live(record)
    watch.start()
    answers = operated.start("watched")
    items: list[Item] = []
    heard: list[SchedulerMetrics] = []

    def heard_of_all() -> bool:
        items.extend(watch.take())
        heard[:] = [item for item in items if isinstance(item, SchedulerMetrics) and item.requests]
        return len(heard) >= 3 and any(isinstance(item, HttpMetrics) for item in items)

    wait_until(heard_of_all, PATIENCE_S, "metrics of the scheduler and the front")
    assert heard[0].steps_total < heard[1].steps_total < heard[2].steps_total
    assert [info.rid for info in heard[2].requests] == ["watched"]
    operated.rpc.call(AbortReqInput(everything=True))
    assert finish(answers["watched"]) == "abort"
    watch.close()
    deaf.close()
    assert list(record.directory.glob("watch-*")) == [record.directory / "watch-deaf"]
