"""One RPC to every replica of an instance at the same time; an update of the weights takes effect on all or none.

The call to a single replica is in client.py.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from llmserve.runtime import decision
from llmserve.runtime.client import AsyncRpcClient, OnProgress, RpcCallError
from llmserve.runtime.messages import ControlRequest, RpcProgress, UpdateWeightReqInput
from llmserve.runtime.ports import replica_of

AnswerT = TypeVar("AnswerT")


async def call_each(
    directory: Path,
    addresses: Sequence[str],
    request: ControlRequest[AnswerT],
    timeout_s: float,
    on_progress: OnProgress | None = None,
) -> list[AnswerT]:
    """Sends `request` to the schedulers at `addresses` and returns their answers in the same order.

    Waits for every call to end; then raises RpcCallError if any has failed, with the code of the first failure and the
    messages of all. Cancelling it cancels all the calls.
    """
    if len(addresses) > 1 and isinstance(request, UpdateWeightReqInput) and not request.dry_run:
        return await _update_all(directory, addresses, request, timeout_s, on_progress)
    calls = [_call(address, request, timeout_s, on_progress) for address in addresses]
    return _all(addresses, await _gather(calls))


async def ask_each(
    addresses: Sequence[str], request: ControlRequest[AnswerT], timeout_s: float
) -> list[AnswerT | RpcCallError]:
    """Like call_each, but returns the error of a replica that fails in place of its answer. Not for weight updates."""
    return await _gather([_call(address, request, timeout_s, None) for address in addresses])


async def _call(
    address: str, request: ControlRequest[AnswerT], timeout_s: float, on_progress: OnProgress | None
) -> AnswerT:
    with contextlib.closing(AsyncRpcClient(address, timeout_s)) as client:
        return await client.call(request, on_progress)


async def _gather(calls: Sequence["asyncio._CoroutineLike[AnswerT]"]) -> list[AnswerT | RpcCallError]:
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RpcCallError):
            raise result
    return results  # type: ignore[return-value]


def _all(addresses: Sequence[str], results: Sequence[AnswerT | RpcCallError]) -> list[AnswerT]:
    """The results, if all are answers. Raises RpcCallError if not."""
    failures = {
        replica_of(each): it for each, it in zip(addresses, results, strict=True) if isinstance(it, RpcCallError)
    }
    if not failures:
        return list(results)  # type: ignore[arg-type]
    error = joined(failures, len(addresses))
    if len(failures) < len(addresses):
        error = RpcCallError(error.code, f"{error.message}; the others have done it")
    raise error


def joined(failures: Mapping[int, RpcCallError], asked: int) -> RpcCallError:
    """One error for all `failures`, by dp_rank, of a call to `asked` replicas."""
    first = next(iter(failures.values()))
    if asked == 1:
        return first
    if len(failures) == asked and len({error.message for error in failures.values()}) == 1:
        return RpcCallError(first.code, f"each of {asked} replicas: {first.message}")
    told = [f"replica {number}: {error.message}" for number, error in failures.items()]
    return RpcCallError(first.code, "; ".join(told))


async def _update_all(
    directory: Path,
    addresses: Sequence[str],
    request: UpdateWeightReqInput,
    timeout_s: float,
    on_progress: OnProgress | None,
) -> list[AnswerT]:
    """Two-phase commit: each replica stages the new weights and pauses. When all have, the decision is to commit; when
    one fails, it is to abort.
    """
    name = decision.new_name()
    request = msgspec.structs.replace(request, decision=name)
    prepared: set[str] = set()

    def listen(address: str) -> Callable[[RpcProgress], None]:
        def take(progress: RpcProgress) -> None:
            if progress.stage == "prepared":
                prepared.add(address)
                if len(prepared) == len(addresses):
                    decision.decide(directory, name, "commit")
            elif on_progress is not None:
                on_progress(progress)

        return take

    async def call(address: str) -> AnswerT:
        try:
            return await _call(address, request, timeout_s, listen(address))  # type: ignore[arg-type]
        except BaseException:
            decision.decide(directory, name, "abort")
            raise

    try:
        return _all(addresses, await _gather([call(address) for address in addresses]))
    finally:
        if len(prepared) < len(addresses):
            decision.decide(directory, name, "abort")


class Replicas:
    """The live replicas of an instance, for asyncio code. `addresses` returns their RPC sockets."""

    def __init__(self, directory: Path, addresses: Callable[[], Sequence[str]]) -> None:
        self._directory = directory
        self._addresses = addresses

    async def each(self, request: ControlRequest[AnswerT], timeout_s: float) -> dict[int, AnswerT]:
        """As call_each, with the answers by dp_rank."""
        addresses = self._addresses()
        answers = await call_each(self._directory, addresses, request, timeout_s)
        return dict(zip(map(replica_of, addresses), answers, strict=True))
