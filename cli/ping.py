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
    from llmserve.runtime.messages import PingReqInput

    console = console_of(ctx)
    times_ms: list[float] = []
    with Remote.find(instance, timeout) as remote:
        try:
            while len(times_ms) < count:
                if times_ms:
                    time.sleep(interval)
                start = time.perf_counter()
                answers = remote.each(PingReqInput())
                times_ms.append((time.perf_counter() - start) * 1000)
        except KeyboardInterrupt:
            if not times_ms:
                raise
    done = len(times_ms)
    times_ms.sort()
    p50, p99 = (times_ms[min(done - 1, int(done * share))] for share in (0.50, 0.99))
    if json:
        console.json(
            {
                "instance": remote.record.name,
                "count": done,
                "min_ms": round(times_ms[0], 3),
                "p50_ms": round(p50, 3),
                "p99_ms": round(p99, 3),
                "max_ms": round(times_ms[-1], 3),
                "replicas": [
                    {
                        "replica": replica,
                        "state": answer.state,
                        "step": answer.step,
                        "in_step_s": round(answer.in_step_s, 3),
                    }
                    for replica, answer in zip(remote.replicas, answers, strict=True)
                ],
            }
        )
    elif count == 1:
        states = "; ".join(
            f"{remote.label(replica)}{answer.state}, step {answer.step}{delay_of(answer.in_step_s)}"
            for replica, answer in zip(remote.replicas, answers, strict=True)
        )
        console.print(f"PONG {times_ms[0]:.2f} ms ({states})")
    else:
        figures = {"min": times_ms[0], "p50": p50, "p99": p99, "max": times_ms[-1]}
        console.print(f"{done} × PONG  " + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()) + " ms")
    if done < count:
        raise typer.Exit(128 + signal.SIGINT)


def delay_of(in_step_s: float) -> str:
    """What to say after the number of steps where the one that is under way takes long."""
    return f", the next one takes {duration(in_step_s)} already" if in_step_s >= LONG_STEP_S else ""
