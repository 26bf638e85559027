"""`llmserve ping`: the round trip to the scheduler, which also says that it takes steps."""

import signal
import time
from typing import Annotated

import typer

from llmserve.cli.common import InstanceOption, JsonOption, TimeoutOption, console_of
from llmserve.cli.format import duration

LONG_STEP_S = 1.0


def ping(
    ctx: typer.Context,
    instance: InstanceOption = None,
    count: Annotated[int, typer.Option("--count", "-c", metavar="N", min=1, help="The number of pings.")] = 1,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.0, help="The time between two pings.")
    ] = 0.0,
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
) -> None:
    """Measure the round trip to the scheduler.

    The answer comes from between two steps, so under load it takes up to one step, or half a second of a longer one.
    Ctrl-C ends it with the figures so far.
    """
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.messages import PingReqInput, PingReqOutput

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        times_ms: dict[int, list[float]] = {replica: [] for replica in remote.replicas}
        answers: dict[int, PingReqOutput] = {}
        try:
            for number in range(count):
                if number:
                    time.sleep(interval)
                for replica, times in times_ms.items():
                    start = time.perf_counter()
                    answers[replica] = remote.one(replica, PingReqInput())
                    times.append((time.perf_counter() - start) * 1000)
        except KeyboardInterrupt:
            if not all(times_ms.values()):
                raise
    done = min(map(len, times_ms.values()))
    if json:
        replicas = [
            {
                "replica": replica,
                **figures(times_ms[replica]),
                "state": answer.state,
                "step": answer.step,
                "in_step_s": round(answer.in_step_s, 3),
            }
            for replica, answer in answers.items()
        ]
        every = [time_ms for times in times_ms.values() for time_ms in times]
        console.json({"instance": remote.record.name, "count": done, **figures(every), "replicas": replicas})
    else:
        for replica, answer in answers.items():
            if count == 1:
                state = f"{answer.state}, step {answer.step}{delay_of(answer.in_step_s)}"
                told = f"PONG {times_ms[replica][0]:.2f} ms ({state})"
            else:
                named = (f"{name.removesuffix('_ms')} {ms:.2f}" for name, ms in figures(times_ms[replica]).items())
                told = f"{done} × PONG  {'  '.join(named)} ms"
            console.print(f"{remote.label(replica)}{told}")
    if done < count:
        raise typer.Exit(128 + signal.SIGINT)


def figures(times_ms: list[float]) -> dict[str, float]:
    """What --json says of some round trips."""
    ordered = sorted(times_ms)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.50, 0.99))
    found = {"min_ms": ordered[0], "p50_ms": p50, "p99_ms": p99, "max_ms": ordered[-1]}
    return {name: round(ms, 3) for name, ms in found.items()}


def delay_of(in_step_s: float) -> str:
    """What to say after the number of steps where the one that is under way takes long."""
    return f", the next one takes {duration(in_step_s)} already" if in_step_s >= LONG_STEP_S else ""
