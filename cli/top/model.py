"""The data model of `top`: takes samples, and makes Snapshots with every number that is shown.

It knows neither sockets nor the screen. Rates, quantiles and states are computed here, so that the screen, `--json` and
the plain lines agree. All times are in seconds; the samples' own Unix time is the only clock.
"""

import msgspec

from llmserve.cli.top.history import History
from llmserve.cli.top.latencies import WINDOW_S, Latencies
from llmserve.cli.top.processes import Processes
from llmserve.cli.top.samples import GpuInfo, Gpus, Link, Sample
from llmserve.cli.top.snapshot import Cache, Gpu, Latency, Load, Replica, Request, Snapshot, State
from llmserve.runtime.messages import HttpMetrics, RequestInfo, SchedulerMetrics

STALE_S = 3.5
"""A scheduler says something at least once a second, and the front with it; silent for so long, they are stalled."""
FULL = 0.9
"""The KV pool counts as full from this fraction on, because a waiting request needs more than one page."""
NO_STEP_S = 5.0
"""So long without a step while requests run, and it is stalled, whatever it says."""


class Model:
    """Takes samples in order of time and makes snapshots."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self._replicas: dict[int, SchedulerMetrics] = {}
        self._stepped: dict[int, float] = {}
        """When each replica last had made a step, or had nothing to run."""
        self._history = History()
        self._latencies = Latencies()
        self._processes = Processes()
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
            for rank in sample.lost_replicas:
                self._lose(rank)

    @property
    def has_rates(self) -> bool:
        """Whether each scheduler and the front have sent at least two samples."""
        return len(self._history) > len(self._replicas) and not self._unheard() and len(self._latencies) >= 2

    @property
    def has_numbers(self) -> bool:
        """Whether a scheduler has sent metrics."""
        return bool(self._replicas)

    @property
    def expects_data(self) -> bool:
        """Whether the instance is there and has not said anything yet."""
        return not self._replicas and (self.link is None or self.link.status in ("connecting", "connected"))

    def snapshot(self, now: float) -> Snapshot:
        """Everything as it is at `now`, which is not before the last sample."""
        link = self.link
        newest = self._history.newest if self._history else None
        replicas = list(self._replicas.values())
        shown = {rank: _replica(replica, now) for rank, replica in self._replicas.items()}
        if link is not None and replicas:
            shown |= {rank: _unheard_replica(rank, now - link.time) for rank in self._unheard()}
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
            replicas=tuple(shown[rank] for rank in sorted(shown)),
            load=self._load(now),
            cache=self._cache(now),
            latency=self._latency(now),
            outcomes=dict(self._latencies.newest.outcomes) if self._latencies else {},
            bad_frames=sum(r.bad_frames_total for r in replicas),
            processes=self._processes.rows(now),
            gpus=tuple(Gpu(**msgspec.structs.asdict(gpu)) for gpu in self._gpus),
            requests=tuple(_request(info, r, now) for r in replicas for info in r.requests),
            history=self._history.curves(now),
        )

    # ---- taking samples --------------------------------------------------------------------------------------------

    def _add_scheduler(self, sample: SchedulerMetrics) -> None:
        if self.link is not None and sample.dp_rank in self.link.lost_replicas:
            return  # a late message
        before = self._replicas.get(sample.dp_rank)
        if before is not None and sample.steps_total < before.steps_total:
            self._forget()  # counters never decrease: this is another instance of the same name
            before = None
        if before is None or sample.steps_total > before.steps_total or not sample.running:
            self._stepped[sample.dp_rank] = sample.time
        if before is None:
            self._history.clear()  # the earlier counts of a new replica are not growth
        self._replicas[sample.dp_rank] = sample
        self._processes.add(sample.processes, sample.time)
        self._processes.add_work(sample)
        self._history.add(self._replicas.values(), sample.time)

    def _add_http(self, sample: HttpMetrics) -> None:
        self._processes.add(sample.processes, sample.time)
        self._latencies.add(sample)

    def _lose(self, rank: int) -> None:
        """A replica has died: it has nothing any more, but what it had counted still counts."""
        replica = self._replicas.get(rank)
        if replica is not None and replica.state != "lost":
            nothing = dict.fromkeys(("running", "waiting", "max_running", "step_s"), 0)
            no_memory = dict.fromkeys(("kv_tokens_total", "kv_tokens_used", "kv_tokens_cached"), 0)
            self._replicas[rank] = msgspec.structs.replace(
                replica, state="lost", requests=(), processes=(), **nothing, **no_memory
            )
            self._processes.remove(replica.processes)

    def _forget(self) -> None:
        for held in (self._replicas, self._stepped, self._history, self._latencies, self._processes):
            held.clear()

    # ---- working out -----------------------------------------------------------------------------------------------

    def _state(self, now: float) -> tuple[State, str]:
        if self.link is not None and self.link.status in ("dead", "lost"):
            return ("dead" if self.link.status == "dead" else "lost"), self.link.detail
        detail = self.link.detail if self.link is not None else ""
        if not self._replicas:
            return self._state_without_data(now, detail)
        lost = self.link.lost_replicas if self.link is not None else ()
        replicas = {rank: replica for rank, replica in self._replicas.items() if rank not in lost}
        unheard = self._unheard()
        faults = [fault for rank in sorted({*replicas, *unheard}) if (fault := self._fault(rank, now))]
        if faults and len(faults) == len(replicas) + len(unheard):
            return "stalled", detail or faults[0]
        faults = [f"replica {rank} is lost" for rank in lost] + faults
        if detail and (len(replicas) + len(unheard) == 1 or "scheduler-dp" not in detail):
            return "stalled", detail
        silences = {"front": self._front_silence(now), "detokenizer": self._processes.silence_s("detokenizer", now)}
        for who, silent_s in silences.items():
            if silent_s > STALE_S:
                return "stalled", detail or f"the {who} has said nothing for {silent_s:.0f} s"
        if self.link is not None and self.link.status == "draining":
            return "draining", ""
        if detail or faults:
            return "degraded", detail or "; ".join(faults)
        if unheard:
            return "connecting", ""
        states = {replica.state for replica in replicas.values()}
        for state in ("starting", "paused", "draining"):
            if state in states:
                return state, ""
        return "ready", ""

    def _state_without_data(self, now: float, detail: str) -> tuple[State, str]:
        if not self.expects_data:
            return "starting", detail
        silent_s = now - self.link.time if self.link is not None else 0.0
        if detail or silent_s > STALE_S:
            return "stalled", detail or f"the scheduler has said nothing for {silent_s:.0f} s"
        return "connecting", ""

    def _front_silence(self, now: float) -> float:
        """Seconds since the front's last metrics, or since the connection if there were none."""
        if self._latencies:
            return now - self._latencies.newest.time
        return now - self.link.time if self.link is not None else 0.0

    def _unheard(self) -> list[int]:
        """The replicas that live, as the registry says, and have not said anything yet."""
        if self.link is None:
            return []
        ranks = range(self.link.replicas + len(self.link.lost_replicas))
        return [rank for rank in ranks if rank not in self._replicas and rank not in self.link.lost_replicas]

    def _fault(self, rank: int, now: float) -> str:
        """What is wrong with a replica; empty if nothing is."""
        if rank not in self._replicas:
            silent_s = now - self.link.time if self.link is not None else 0.0
            return f"replica {rank} has said nothing for {silent_s:.0f} s" if silent_s > STALE_S else ""
        replica, idle_s = self._replicas[rank], now - self._stepped[rank]
        who = f"replica {rank}" if len(self._replicas) + len(self._unheard()) > 1 else "the scheduler"
        if now - replica.time > STALE_S:
            return f"{who} has said nothing for {now - replica.time:.0f} s"
        if replica.running and idle_s > NO_STEP_S and replica.state == "ready":
            return f"{who} made no step for {idle_s:.0f} s while {replica.running} run"
        return ""

    def _load(self, now: float) -> Load:
        if not self._history:
            return Load()
        newest = self._history.newest
        rate = self._history.rates(now)
        return Load(
            running=newest.running,
            max_running=sum(replica.max_running for replica in self._replicas.values()),
            waiting=newest.waiting,
            obstacle=next(filter(None, map(_obstacle, self._replicas.values())), ""),
            prefill_tokens_per_s=rate(lambda t: t.prefill),
            decode_tokens_per_s=rate(lambda t: t.decode),
            requests_per_s=rate(lambda t: t.requests),
            steps_per_s=rate(lambda t: t.steps),
            step_s=max(replica.step_s for replica in self._replicas.values()),
        )

    def _cache(self, now: float) -> Cache:
        if not self._history:
            return Cache()
        newest, before = self._history.newest, self._history.before(now - WINDOW_S)
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
            evicted_tokens_per_s=self._history.rates(now)(lambda t: t.evicted),
            retractions=newest.retractions,
            retractions_last_minute=newest.retractions - before.retractions,
            asked_retractions=newest.asked_retractions,
        )

    def _latency(self, now: float) -> Latency:
        if not self._latencies or not self._history:
            return Latency()
        return self._latencies.latency(now, self._history.newest.itl, self._history.before(now - WINDOW_S).itl)


def _obstacle(replica: SchedulerMetrics) -> str:
    if not replica.waiting:
        return ""
    if replica.state == "paused":
        return "paused"
    if replica.running >= replica.max_running > 0:
        return f"all {replica.max_running} places taken"
    if replica.kv_tokens_used >= FULL * replica.kv_tokens_total:
        return "KV pool full"
    return "prefill busy" if any(request.state == "prefill" for request in replica.requests) else ""


def _replica(replica: SchedulerMetrics, now: float) -> Replica:
    return Replica(
        dp_rank=replica.dp_rank,
        state=replica.state,
        running=replica.running,
        waiting=replica.waiting,
        kv_used=replica.kv_tokens_used,
        kv_total=replica.kv_tokens_total,
        heartbeat_age_s=max(0.0, now - replica.time),
    )


def _unheard_replica(rank: int, silent_s: float) -> Replica:
    nothing = dict.fromkeys(("running", "waiting", "kv_used", "kv_total"), 0)
    return Replica(dp_rank=rank, state="connecting", heartbeat_age_s=max(0.0, silent_s), **nothing)


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
