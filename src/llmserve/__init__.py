"""llmserve: serve language models, and operate the running server from the terminal.

`from llmserve import Engine` is the stack for Python code, without HTTP. Importing llmserve alone loads nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.runtime.engine_api import Engine, RequestError, SamplingParams

__all__ = ["Engine", "RequestError", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from llmserve.runtime import engine_api

        return getattr(engine_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
