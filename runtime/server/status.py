"""The state of the server: GET /health, /metrics and /server_info."""

import importlib.metadata

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from llmserve.runtime.messages import PROTOCOL_VERSION, SchedulerMetrics
from llmserve.runtime.models.sampling_defaults import SamplingDefaults
from llmserve.runtime.server.body import json_response
from llmserve.runtime.server.context import Context
from llmserve.runtime.server.openapi import operation
from llmserve.runtime.server.prometheus import CONTENT_TYPE, exposition
from llmserve.runtime.tokenizer_manager import TokenizerManager


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is "ok", why the instance does not serve, or "degraded: " and which replicas do not while others do."""

    status: str


class SchedulerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """From the schedulers' latest metrics, about a second old at most."""

    time: float
    weight_version: int
    uptime_s: float
    running: int
    waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    kv_tokens_cached: int


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`options` are the values of ServerArgs in effect, which hold no secrets. `sampling_defaults` are for requests
    that leave them out.
    """

    version: str
    protocol: int
    state: str
    model: str
    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    options: dict[str, object]
    sampling_defaults: SamplingDefaults
    scheduler: SchedulerLoad | None


def add_routes(app: FastAPI, context: Context) -> None:
    manager = context.manager
    version = importlib.metadata.version("llmserve")

    @app.head("/health", include_in_schema=False)  # as used by some load balancers
    @app.get("/health", openapi_extra=operation(answer=Health))
    async def health() -> Response:
        """200 while the instance serves, paused or degraded too; 503 while it drains, or what all need is stuck."""
        healthy, status = manager.healthy()
        return json_response(Health(status=status), 200 if healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        text = exposition(manager.http_metrics(), manager.scheduler_metrics)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    @app.get("/server_info", openapi_extra=operation(answer=ServerInfo))
    async def server_info() -> Response:
        """The model, the options in effect and the load."""
        return json_response(
            ServerInfo(
                version=version,
                protocol=PROTOCOL_VERSION,
                state=_state(manager),
                model=context.checkpoint.name,
                served_model_names=context.model_names,
                max_model_len=manager.limits.max_model_len,
                vocab_size=manager.limits.vocab_size,
                options=context.options,
                sampling_defaults=context.sampling_defaults,
                scheduler=_scheduler_load(manager.scheduler_metrics),
            )
        )


def _state(manager: TokenizerManager) -> str:
    """The manager's state, or the scheduler's while ready, which tells whether it is paused."""
    if manager.state == "ready" and manager.scheduler_metrics is not None:
        return manager.scheduler_metrics.state
    return manager.state


def _scheduler_load(metrics: SchedulerMetrics | None) -> SchedulerLoad | None:
    if metrics is None:
        return None
    return SchedulerLoad(**{name: getattr(metrics, name) for name in SchedulerLoad.__struct_fields__})
