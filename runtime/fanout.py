"""One RPC to every replica of an instance at the same time; an update of the weights takes effect on all or none.

The call to a single replica is in client.py.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
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
    return await _gather(addresses, [_call(address, request, timeout_s, on_progress) for address in addresses])


async def _call(
    address: str, request: ControlRequest[AnswerT], timeout_s: float, on_progress: OnProgress | None
) -> AnswerT:
    with contextlib.closing(AsyncRpcClient(address, timeout_s)) as client:
        return await client.call(request, on_progress)


async def _gather(addresses: Sequence[str], calls: Sequence["asyncio._CoroutineLike[AnswerT]"]) -> list[AnswerT]:
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures: dict[int, RpcCallError] = {}
    for address, result in zip(addresses, results, strict=True):
        if isinstance(result, RpcCallError):
            failures[replica_of(address)] = result
        elif isinstance(result, BaseException):
            raise result
    if failures:
        raise _joined(failures, len(addresses))
    return list(results)  # type: ignore[arg-type]


def _joined(failures: dict[int, RpcCallError], asked: int) -> RpcCallError:
    """One error for all `failures`, by dp_rank, of a call to `asked` replicas."""
    first = next(iter(failures.values()))
    if len(failures) == asked and len({error.message for error in failures.values()}) == 1:
        return first
    told = [f"replica {number}: {error.message}" for number, error in failures.items()]
    if len(failures) < asked:
        told.append("the others have done it")
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
        return await _gather(addresses, [call(address) for address in addresses])
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
