"""RPC calls to all replicas of a running instance, straight to the schedulers' sockets, and showing their progress.

Importing it loads zmq, so commands import it when they run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import structs

from llmserve.cli import format
from llmserve.cli.common import CommandError, ExitCode, find_server
from llmserve.runtime.client import RpcCallError, RpcClient, rpc_address
from llmserve.runtime.messages import ControlRequest, GetLoadReqInput, RpcProgress
from llmserve.runtime.ports import replica_of

if TYPE_CHECKING:
    from rich.progress import TaskID

    from llmserve.cli.console import Console
    from llmserve.runtime.instance import InstanceRecord

AnswerT = TypeVar("AnswerT")
OnProgress = Callable[[RpcProgress], None]


class Answers(dict[int, AnswerT], Generic[AnswerT]):
    """Answers by dp_rank. When some replicas have failed, it has those of the others, and `failure` is the error.

    A command prints the answers and then calls `check`, so that one replica that hangs does not hide the others.
    """

    failure: RpcCallError | None = None

    def check(self) -> None:
        """Raises RpcCallError if a replica has failed."""
        if self.failure is not None:
            raise self.failure

    def as_json(self) -> list[dict[str, Any]]:
        """One object per replica: its number and the fields of its answer."""
        return [{"replica": replica, **structs.asdict(answer)} for replica, answer in self.items()]  # type: ignore[arg-type]


class Remote:
    """The schedulers of one instance, in the order of their dp_rank."""

    def __init__(self, record: "InstanceRecord", timeout_s: float) -> None:
        self.record = record
        addresses = record.rpc_addresses or (rpc_address(record),)
        self._clients = [RpcClient(address, timeout_s) for address in addresses]

    @staticmethod
    def find(instance: str | None, timeout_s: float) -> "Remote":
        """The schedulers of the running instance of this name, or of the only one. Raises InstanceError, and
        CommandError while it starts or where another machine has them.
        """
        record = find_server(instance)
        if record.state == "starting":
            raise CommandError(f'instance "{record.name}" is still starting', ExitCode.UNAVAILABLE)
        return Remote(record, timeout_s)

    def each(
        self, request: ControlRequest[AnswerT], on_progress: OnProgress | None = None, timeout_s: float | None = None
    ) -> list[AnswerT]:
        """Sends the request to all replicas at the same time; returns their answers in order. Raises RpcCallError."""
        if len(self._clients) == 1:
            return [self._clients[0].call(request, on_progress, timeout_s)]
        import asyncio

        from llmserve.runtime.fanout import call_each

        timeout_s = self._clients[0].timeout_s if timeout_s is None else timeout_s
        addresses = [client.address for client in self._clients]
        return asyncio.run(call_each(self.record.directory, addresses, request, timeout_s, on_progress))

    def one(self, replica: int, request: ControlRequest[AnswerT]) -> AnswerT:
        """Sends `request` to one replica. Raises RpcCallError."""
        try:
            return self._clients[self.replicas.index(replica)].call(request)
        except RpcCallError as error:
            raise RpcCallError(error.code, f"{self.label(replica)}{error.message}") from None

    def some(self, request: ControlRequest[AnswerT]) -> Answers[AnswerT]:
        """As `each`, but keeps the answers of some replicas when others fail. Raises RpcCallError when all fail."""
        if len(self._clients) == 1:
            return Answers({self.replicas[0]: self._clients[0].call(request)})
        import asyncio

        from llmserve.runtime.fanout import ask_each, joined

        addresses = [client.address for client in self._clients]
        results = asyncio.run(ask_each(addresses, request, self._clients[0].timeout_s))
        answers: Answers[AnswerT] = Answers()
        failures = {}
        for replica, result in zip(self.replicas, results, strict=True):
            if isinstance(result, RpcCallError):
                failures[replica] = result
            else:
                answers[replica] = result
        if failures:
            answers.failure = joined(failures, len(addresses))
        if not answers:
            answers.check()
        return answers

    @property
    def replicas(self) -> list[int]:
        """The dp_ranks of the replicas, in the order of the answers of `each`."""
        return [replica_of(client.address) for client in self._clients]

    @property
    def several(self) -> bool:
        """Whether there are several replicas, so that output must name them."""
        return len(self._clients) > 1

    def label(self, replica: int) -> str:
        """The beginning of a line about one replica; empty if there is only one."""
        return f"replica {replica}: " if self.several else ""

    def open_requests(self) -> int:
        """How many choices of requests run and wait."""
        return sum(load.running + load.waiting for load in self.some(GetLoadReqInput()).values())

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProgressReport:
    """Shows the progress messages of a call, within `with`: as a bar on a terminal, else as a line per stage."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._progress = console.progress()
        self._bar = console.err.is_terminal
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> OnProgress:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, progress: RpcProgress) -> None:
        if progress.stage not in self._stages:
            if not self._bar:
                self._console.note(progress.stage)
            self._stages[progress.stage] = self._progress.add_task(progress.stage, amount="", total=None)
        task, total = self._stages[progress.stage], progress.total or None
        self._progress.update(task, completed=progress.done, total=total, amount=_amount(progress))


def _amount(progress: RpcProgress) -> str:
    write = format.size if progress.unit == "bytes" else lambda count: f"{format.number(count)} {progress.unit}".strip()
    if progress.total:
        return f"{write(progress.done)} of {write(progress.total)}"
    return write(progress.done) if progress.done else ""
