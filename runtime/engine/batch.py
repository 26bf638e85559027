"""The plan of one step and its result: the interface between the scheduler and a worker.

A plan carries everything that a rank needs for the step and refers to no state but the KV pages. So ranks keep no state
of requests, and need no message when one is aborted, retracted or lost. Plans are msgspec Structs, which travel to
other ranks as bytes in a tensor. Token ids and page numbers are int32 bytes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from llmserve.runtime.messages import Logprobs, SamplingParams

if TYPE_CHECKING:
    from llmserve.runtime.models.hub import Checkpoint


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the next token of a row is chosen.

    `position` is the index in the sequence of the token to be drawn; with `seed` it keys the random number.
    `history` (int32 bytes: prompt then output) and `prompt_len` are given only where penalties need them.
    """

    params: SamplingParams
    seed: int
    position: int
    top_logprobs: int | None = None
    """None: no logprob wanted; 0: the chosen token's; k: also the k likeliest."""
    forbidden: tuple[int, ...] = ()
    """Tokens that may not be drawn now: the stop tokens, while fewer than min_tokens are out."""
    history: bytes = b""
    prompt_len: int = 0
    mask: bytes = b""
    """The tokens that a grammar allows, one bit per token id, least significant first; empty: all tokens."""


class PlanRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One choice's share of a step: tokens [start, start + len(token_ids)) are computed and written to its pages."""

    token_ids: bytes
    start: int
    pages: bytes
    """The block table, covering at least start + len(token_ids) tokens."""
    sample: SampleSpec | None = None
    """None: the row does not reach its last known token in this step, so nothing is drawn."""
    prompt_logprobs: int | None = None
    """Not None: logprobs of the tokens that follow each position of this row, with so many alternatives.
    The token that follows the last position is in `next_token`.
    """
    next_token: int | None = None
    pool: str = ""
    """"mean": return the sum of the final hidden states of the row's tokens; "last": that of its last token."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[PlanRow, ...]


class RowResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden: bytes = b""
    """float32 [hidden_size] where the plan asked for `pool`."""
    error: str = ""
    """Why this row failed while the others succeeded, for instance because its logits are not finite."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[RowResult, ...]


class WorkerDied(Exception):
    """The worker or one of its ranks is gone: no further step can succeed."""


class StepHandle(Protocol):
    """A submitted step. `result` waits for it; it raises what the forward pass raised, or WorkerDied."""

    def result(self) -> StepResult: ...

    def done(self) -> bool: ...


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler needs to know about its worker's model and KV pool."""

    vocab_size: int
    max_model_len: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    bytes_per_page: int
    weight_bytes: int
    in_effect: dict[str, str | int] = {}
    """The values in effect of options that the worker resolves (device, dtype …), by their names in ServerArgs."""


class WeightSwap(Protocol):
    """How the weights of a worker are exchanged: on all its ranks, or on none. Implemented by engine/swap.py."""

    def differences(self, new: "Checkpoint") -> list[str]:
        """What keeps a checkpoint from replacing the one that serves, a line each. Raises ConfigError."""
        ...

    def stage(self, new: "Checkpoint", progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> int:
        """Reads the new weights beside those that serve, in another thread; returns their bytes.

        `progress` is called with (done, total) in bytes. Raises ConfigError, or what a read raises; then, or when it
        was `cancelled`, nothing is staged.
        """
        ...

    def commit(self) -> None:
        """Puts the staged weights in place while no step runs. If it raises, the old ones are in place."""
        ...

    def discard(self) -> None:
        """Frees what is staged."""
        ...


class Worker(Protocol):
    """One replica's model, however many ranks hold it. Implemented by engine/runner.py; tests have a fake one."""

    info: WorkerInfo
    swap: WeightSwap

    def submit(self, plan: StepPlan) -> StepHandle: ...


def int32_bytes(values: "np.ndarray | list[int] | tuple[int, ...]") -> bytes:
    """Little-endian int32 bytes of token ids or page numbers."""
    return np.asarray(values, dtype="<i4").tobytes()


def int32_array(data: bytes) -> "np.ndarray":
    """The inverse of int32_bytes, [len(data) // 4], read-only."""
    return np.frombuffer(data, dtype="<i4")
