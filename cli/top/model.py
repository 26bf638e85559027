"""The data behind `top`: samples go in, a Snapshot with every number that is shown comes out.

It knows no socket and no screen. Rates, quantiles and states are worked out here, so that the screen, `--json` and the
plain lines agree. All times in seconds; a sample's own clock (Unix time) is the only clock.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from llmserve.cli.top.samples import GpuInfo, Gpus, Link, Sample
from llmserve.runtime.histogram import added
from llmserve.runtime.messages import Histogram, HttpMetrics, ProcessInfo, RequestInfo, SchedulerMetrics

SCHEMA_VERSION = 1
WINDOW_S = 60.0
"""Quantiles and the hit rate are over this last time."""
SHORT_S = 5.0
"""Quantiles of less time than this may be of a handful of tokens: of fewer than FEW, all since the start count."""
FEW = 5
RATE_S = 3.0
"""Rates are over this last time: short enough to see a change, long enough to be read."""
BUBBLE_S = 10.0
"""The waiting of ranks is over this last time: their reports are up to a second old."""
HISTORY_S = 300
STALE_S = 3.5
"""A scheduler says something at least once a second, and the front with it; silent for so long, they are stalled."""
NO_STEP_S = 5.0
"""So long without a step while requests run, and it is stalled, whatever it says."""

State = Literal["starting", "ready", "draining", "paused", "stalled", "dead", "lost"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    running: int = 0
    waiting: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    steps_per_s: float = 0.0
    step_s: float = 0.0


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the KV pool. `used` is held by requests; `cached` is kept for prefixes and can be evicted."""

    total: int = 0
    used: int = 0
    cached: int = 0
    free: int = 0
    hit_rate: float | None = None
    """Of the prompt tokens of the last minute, the share that came from the cache."""
    hit_rate_lifetime: float | None = None
    evicted_tokens: int = 0
    evicted_tokens_per_s: float = 0.0
    retractions: int = 0
    """For want of memory."""
    retractions_last_minute: int = 0
    asked_retractions: int = 0
    """For a pause or a swap of the weights."""


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of the `count` observations in the window; None where there are none."""

    count: int = 0
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    window_s: float = 0.0
    """0: since the instance's start."""
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    queue: Quantiles = Quantiles()


class Process(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    pid: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    rss_bytes: int
    cpu_percent: float
    heartbeat_age_s: float
    dropped_messages: int
    weight_bytes: int = 0
    bubble: float | None = None
    """Of the time with a step in some stage, lately, the share that this rank has waited for its turn; None where it is
    alone or nothing ran."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    rid: str
    index: int
    dp_rank: int
    state: str
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_new_tokens: int
    tokens_per_s: float
    ttft_s: float | None
    retractions: int
    user: str


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    used_bytes: int
    total_bytes: int
    busy_percent: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that top shows at `time`; what `--json` prints, but for `history`."""

    schema_version: int = SCHEMA_VERSION
    time: float
    instance: str
    model: str
    address: str
    state: State
    reason: str = ""
    """Why the state is a bad one."""
    weight_version: int = 0
    uptime_s: float = 0.0
    data_age_s: float | None = None
    replicas: int = 0
    load: Load = Load()
    cache: Cache = Cache()
    latency: Latency = Latency()
    outcomes: dict[str, int] = {}
    bad_frames: int = 0
    processes: tuple[Process, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    requests: tuple[Request, ...] = ()
    history: dict[str, tuple[float, ...]] = {}
    """A value a second, the newest last."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What all replicas together had counted at one time."""

    time: float
    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    steps: int
    prefill: int
    decode: int
    cached: int
    prompt: int
    requests: int
    evicted: int
    retractions: int
    asked_retractions: int
    itl: Histogram


Rank = tuple[int, int, int, int]
"""dp_rank, pp_rank, tp_rank and pid: pids alone are not unique where ranks are on several machines."""


def rank_of(process: ProcessInfo) -> Rank:
    return process.dp_rank, process.pp_rank, process.tp_rank, process.pid


class Work(NamedTuple):
    """What the ranks of a replica had done by `time`, in seconds since their start."""

    time: float
    active_s: float
    busy_s: dict[Rank, float]


class Model:
    """Takes samples in the order of their time and gives snapshots."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self._replicas: dict[int, SchedulerMetrics] = {}
        self._stepped: dict[int, float] = {}
        """When each replica was last seen to have done a step, or to have nothing to do."""
        self._totals: deque[Totals] = deque()
        self._work: dict[int, deque[Work]] = {}
        """Of each replica of several ranks, over the last BUBBLE_S."""
        self._http: deque[HttpMetrics] = deque()
        self._processes: dict[Rank, tuple[ProcessInfo, float]] = {}
        self._gpus: tuple[GpuInfo, ...] = ()

    def add(self, sample: Sample) -> None:
        if isinstance(sample, SchedulerMetrics):
            self._add_scheduler(sample)
        elif isinstance(sample, HttpMetrics):
            self._add_http(sample)
        elif isinstance(sample, Gpus):
            self._gpus = sample.gpus
        else:
            self.link = sample
            if sample.status in ("starting", "connecting"):
                self._forget()

    @property
    def has_rates(self) -> bool:
        """Whether there are two samples to compare, of the scheduler and of the front."""
        return len(self._totals) >= 2 and len(self._http) >= 2

    @property
    def expects_data(self) -> bool:
        """Whether the instance is there and has not said anything yet."""
        return not self._replicas and (self.link is None or self.link.status == "connecting")

    def snapshot(self, now: float) -> Snapshot:
        """Everything as it is at `now`, which is not before the last sample."""
        link = self.link
        newest = self._totals[-1] if self._totals else None
        replicas = list(self._replicas.values())
        state, reason = self._state(now)
        return Snapshot(
            time=now,
            instance=link.name if link else "",
            model=link.model if link else "",
            address=link.address if link else "",
            state=state,
            reason=reason,
            weight_version=max((r.weight_version for r in replicas), default=0),
            uptime_s=max((r.uptime_s + now - r.time for r in replicas), default=0.0),
            data_age_s=max(0.0, now - newest.time) if newest else None,
            replicas=len(replicas),
            load=self._load(now),
            cache=self._cache(now),
            latency=self._latency(now),
            outcomes=dict(self._http[-1].outcomes) if self._http else {},
            bad_frames=sum(r.bad_frames_total for r in replicas),
            processes=self._process_rows(now),
            gpus=tuple(Gpu(**msgspec.structs.asdict(gpu)) for gpu in self._gpus),
            requests=tuple(_request(info, r, now) for r in replicas for info in r.requests),
            history=self._history(now),
        )

    # ---- taking samples --------------------------------------------------------------------------------------------

    def _add_scheduler(self, sample: SchedulerMetrics) -> None:
        before = self._replicas.get(sample.dp_rank)
        if before is not None and sample.steps_total < before.steps_total:
            self._forget()  # counters never fall: this is another instance under the same name
            before = None
        if before is None or sample.steps_total > before.steps_total or not sample.running:
            self._stepped[sample.dp_rank] = sample.time
        self._replicas[sample.dp_rank] = sample
        self._saw(sample.processes, sample.time)
        if len(sample.processes) > 1:
            work = self._work.setdefault(sample.dp_rank, deque())
            work.append(Work(sample.time, sample.active_s, {rank_of(p): p.busy_s for p in sample.processes}))
            while len(work) > 1 and work[1].time <= sample.time - BUBBLE_S:
                work.popleft()
        self._totals.append(_sum(self._replicas.values(), sample.time))
        while self._totals[0].time < sample.time - HISTORY_S - 1:
            self._totals.popleft()

    def _add_http(self, sample: HttpMetrics) -> None:
        if self._http and sum(sample.e2e.counts) < sum(self._http[-1].e2e.counts):
            self._http.clear()
        self._saw(sample.processes, sample.time)
        self._http.append(sample)
        # The newest of those older than the window stays: it is what the window is measured against.
        while len(self._http) > 1 and self._http[1].time <= sample.time - WINDOW_S:
            self._http.popleft()

    def _saw(self, processes: Sequence[ProcessInfo], time: float) -> None:
        for process in processes:
            self._processes[rank_of(process)] = (process, time)

    def _forget(self) -> None:
        for held in (self._replicas, self._stepped, self._totals, self._work, self._http, self._processes):
            held.clear()

    # ---- working out -----------------------------------------------------------------------------------------------

    def _state(self, now: float) -> tuple[State, str]:
        if self.link is not None and self.link.status in ("dead", "lost"):
            return ("dead" if self.link.status == "dead" else "lost"), self.link.detail
        if not self._replicas:
            silent_s = now - self.link.time if self.link is not None and self.expects_data else 0.0
            if silent_s > STALE_S:
                return "stalled", f"the scheduler has said nothing for {silent_s:.0f} s"
            return "starting", ""
        for rank, replica in self._replicas.items():
            where = f"replica {rank}: " if len(self._replicas) > 1 else ""
            if now - replica.time > STALE_S:
                return "stalled", f"{where}the scheduler has said nothing for {now - replica.time:.0f} s"
            idle_s = now - self._stepped[rank]
            if replica.running and idle_s > NO_STEP_S and replica.state == "ready":
                return "stalled", f"{where}no step for {idle_s:.0f} s while {replica.running} run"
        if self._http and now - self._http[-1].time > STALE_S:
            return "stalled", f"the front has said nothing for {now - self._http[-1].time:.0f} s"
        states = {replica.state for replica in self._replicas.values()}
        for state in ("starting", "paused", "draining"):
            if state in states:
                return state, ""
        return "ready", ""

    def _load(self, now: float) -> Load:
        if not self._totals:
            return Load()
        newest = self._totals[-1]
        rate = self._rates(now)
        return Load(
            running=newest.running,
            waiting=newest.waiting,
            prefill_tokens_per_s=rate(lambda t: t.prefill),
            decode_tokens_per_s=rate(lambda t: t.decode),
            requests_per_s=rate(lambda t: t.requests),
            steps_per_s=rate(lambda t: t.steps),
            step_s=max(replica.step_s for replica in self._replicas.values()),
        )

    def _cache(self, now: float) -> Cache:
        if not self._totals:
            return Cache()
        newest, before = self._totals[-1], self._totals_before(now - WINDOW_S)
        total = sum(replica.kv_tokens_total for replica in self._replicas.values())
        prompt = newest.prompt - before.prompt
        return Cache(
            total=total,
            used=newest.kv_used,
            cached=newest.kv_cached,
            free=max(0, total - newest.kv_used - newest.kv_cached),
            hit_rate=(newest.cached - before.cached) / prompt if prompt else None,
            hit_rate_lifetime=newest.cached / newest.prompt if newest.prompt else None,
            evicted_tokens=newest.evicted,
            evicted_tokens_per_s=self._rates(now)(lambda t: t.evicted),
            retractions=newest.retractions,
            retractions_last_minute=newest.retractions - before.retractions,
            asked_retractions=newest.asked_retractions,
        )

    def _latency(self, now: float) -> Latency:
        if not self._http or not self._totals:
            return Latency()
        newest = self._http[-1]
        old: HttpMetrics | None = self._http[0]
        tokens, before = self._totals[-1].itl, self._totals_before(now - WINDOW_S).itl
        if newest.time - self._http[0].time < SHORT_S and sum(tokens.counts) - sum(before.counts) < FEW:
            old = None
        return Latency(
            window_s=min(WINDOW_S, now - old.time) if old else 0.0,
            ttft=quantiles(newest.ttft, old.ttft if old else None),
            itl=quantiles(tokens, before if old else None),
            e2e=quantiles(newest.e2e, old.e2e if old else None),
            queue=quantiles(newest.queue, old.queue if old else None),
        )

    def _process_rows(self, now: float) -> tuple[Process, ...]:
        order = {"main": 0, "scheduler": 1, "detokenizer": 2}
        rows = sorted(
            self._processes.values(),
            key=lambda seen: (order.get(seen[0].role, 3), seen[0].dp_rank, seen[0].pp_rank, seen[0].tp_rank),
        )
        return tuple(
            Process(
                role=info.role,
                pid=info.pid,
                tp_rank=info.tp_rank,
                pp_rank=info.pp_rank,
                dp_rank=info.dp_rank,
                rss_bytes=info.rss_bytes,
                cpu_percent=info.cpu_percent,
                heartbeat_age_s=max(0.0, now - seen),
                dropped_messages=info.dropped_messages,
                weight_bytes=info.weight_bytes,
                bubble=self._bubble(info),
            )
            for info, seen in rows
        )

    def _bubble(self, rank: ProcessInfo) -> float | None:
        work = self._work.get(rank.dp_rank)
        place = rank_of(rank)
        if not work or place not in work[0].busy_s or place not in work[-1].busy_s:
            return None
        active_s = work[-1].active_s - work[0].active_s
        busy_s = work[-1].busy_s[place] - work[0].busy_s[place]
        return min(1.0, max(0.0, 1 - busy_s / active_s)) if active_s > 0 else None

    def _rates(self, now: float) -> Callable[[Callable[[Totals], int]], float]:
        """A function from a counter to its growth a second over the last RATE_S."""
        newest, before = self._totals[-1], self._totals_before(now - RATE_S)
        elapsed = newest.time - before.time
        return lambda counter: (counter(newest) - counter(before)) / elapsed if elapsed > 0 else 0.0

    def _totals_before(self, time: float) -> Totals:
        """The newest totals that are at least as old as `time`, else the oldest."""
        place = bisect_right(self._totals, time, key=lambda totals: totals.time)
        return self._totals[max(0, place - 1)]

    def _history(self, now: float) -> dict[str, tuple[float, ...]]:
        """Gauges and rates second by second: each second shows the last totals that came by its end."""
        if not self._totals:
            return {}
        first = self._totals[0].time
        seconds = min(HISTORY_S, int(now - first))
        marks = [self._totals_before(now - back) for back in range(seconds, -1, -1)]
        pairs = list(pairwise(marks))

        def grown(counter: Callable[[Totals], int]) -> tuple[float, ...]:
            return tuple(float(counter(b) - counter(a)) for a, b in pairs)

        return {
            "running": tuple(float(mark.running) for mark in marks[1:]),
            "waiting": tuple(float(mark.waiting) for mark in marks[1:]),
            "kv_used": tuple(float(mark.kv_used) for mark in marks[1:]),
            "prefill": grown(lambda t: t.prefill),
            "decode": grown(lambda t: t.decode),
            "requests": grown(lambda t: t.requests),
        }


def quantiles(histogram: Histogram, since: Histogram | None = None) -> Quantiles:
    """p50, p95 and p99 of what was observed after `since`, linear within a bucket as Prometheus' histogram_quantile().

    A quantile that falls above the last bound is given as that bound.
    """
    old = since.counts if since is not None and since.bounds == histogram.bounds else (0,) * len(histogram.counts)
    counts = [new - before for new, before in zip(histogram.counts, old, strict=True)]
    count = sum(counts)
    if count <= 0:
        return Quantiles()

    def at(share: float) -> float:
        rank = share * count
        below, low = 0, 0.0
        for bound, number in zip(histogram.bounds, counts, strict=False):
            if below + number >= rank and number:
                return low + (bound - low) * (rank - below) / number
            below, low = below + number, bound
        return low

    return Quantiles(count=count, p50=at(0.50), p95=at(0.95), p99=at(0.99))


def _sum(replicas: Iterable[SchedulerMetrics], time: float) -> Totals:
    parts = list(replicas)
    return Totals(
        time=time,
        running=sum(r.running for r in parts),
        waiting=sum(r.waiting for r in parts),
        kv_used=sum(r.kv_tokens_used for r in parts),
        kv_cached=sum(r.kv_tokens_cached for r in parts),
        steps=sum(r.steps_total for r in parts),
        prefill=sum(r.prefill_tokens_total for r in parts),
        decode=sum(r.decode_tokens_total for r in parts),
        cached=sum(r.cached_tokens_total for r in parts),
        prompt=sum(r.prompt_tokens_total for r in parts),
        requests=sum(r.requests_total for r in parts),
        evicted=sum(r.evicted_tokens_total for r in parts),
        retractions=sum(r.retractions_total for r in parts),
        asked_retractions=sum(r.asked_retractions_total for r in parts),
        itl=added(r.itl for r in parts),
    )


def _request(info: RequestInfo, replica: SchedulerMetrics, now: float) -> Request:
    return Request(
        rid=info.rid,
        index=info.index,
        dp_rank=replica.dp_rank,
        state=info.state,
        age_s=info.age_s + max(0.0, now - replica.time),
        prompt_tokens=info.prompt_tokens,
        cached_tokens=info.cached_tokens,
        output_tokens=info.output_tokens,
        max_new_tokens=info.max_new_tokens,
        tokens_per_s=info.tokens_per_s,
        ttft_s=info.ttft_s,
        retractions=info.retractions,
        user=info.user,
    )
