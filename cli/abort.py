"""`llmserve abort`: ends requests by name or in bulk; answers after their memory is back."""

import re
import signal
from typing import Annotated

import typer

from llmserve.cli import format
from llmserve.cli.common import (
    CommandError,
    ExitCode,
    InstanceOption,
    JsonOption,
    TimeoutOption,
    YesOption,
    confirm,
    console_of,
)

SAFE_RID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")


def complete_rid(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion of the rids that run or wait, except those with characters that are special to a shell."""
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError
    from llmserve.runtime.instance import InstanceError
    from llmserve.runtime.messages import ListRequestsReqInput

    try:
        with Remote.find(ctx.params.get("instance"), 1.0) as remote:
            answers = remote.some(ListRequestsReqInput())
    except (InstanceError, RpcCallError):
        return []
    rids = dict.fromkeys(info.rid for answer in answers.values() for info in answer.requests)
    given = ctx.params.get("rids") or ()
    return [rid for rid in rids if rid.startswith(incomplete) and rid not in given and SAFE_RID.fullmatch(rid)]


def parse_age(text: str) -> float:
    try:
        return format.seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def abort(
    ctx: typer.Context,
    rids: Annotated[
        list[str] | None,
        typer.Argument(metavar="RID", help="The requests to abort, by exact rid.", autocompletion=complete_rid),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Abort all requests.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than", metavar="AGE", parser=parse_age, help="Abort requests older than this, such as 30s or 5m."
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="P", help="Abort requests whose rid begins with this.")
    ] = "",
    instance: InstanceOption = None,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Abort requests. Their clients get what was generated so far, with finish_reason "abort".

    It returns when their memory is free. Exit status 3 if a named request neither runs nor waits. Without names it asks
    for confirmation, or needs --yes.
    """
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.messages import AbortReqInput, ListRequestsReqInput

    console = console_of(ctx)
    bulk = [everything, older_than is not None, bool(prefix)]
    if sum(bulk) + bool(rids) != 1:
        raise CommandError("name the requests to end, or give one of --all, --older-than and --prefix", ExitCode.USAGE)
    with Remote.find(instance, timeout) as remote:

        def count() -> int:
            found = [info for answer in remote.some(ListRequestsReqInput()).values() for info in answer.requests]
            chosen = {
                info.rid
                for info in found
                if everything
                or (older_than is not None and info.age_s > older_than)
                or (prefix and info.rid.startswith(prefix))
            }
            return len(chosen)

        if not rids:
            confirm(console, count, f' of "{remote.record.name}"', yes)
        request = AbortReqInput(rids=tuple(rids or ()), prefix=prefix, older_than_s=older_than, everything=everything)
        try:
            answers = remote.some(request)
        except KeyboardInterrupt:
            message = "interrupted; what was to end may still do so, see `llmserve requests`"
            raise CommandError(message, 128 + signal.SIGINT) from None
    places = {rid: replica for replica, answer in answers.items() for rid in answer.aborted}
    aborted = sorted(places)
    missing = [rid for rid in dict.fromkeys(rids or ()) if all(rid in answer.not_found for answer in answers.values())]
    if json:
        console.json({"aborted": aborted, "not_found": missing, "replicas": places})
    else:
        rows = [(rid, f"{remote.label(places[rid])}aborted") for rid in aborted]
        rows += [(rid, "not found") for rid in missing]
        if rows:
            console.table(("RID", "RESULT"), rows)
        else:
            console.print("no request to abort")
    answers.check()
    if missing:
        raise typer.Exit(ExitCode.NOT_FOUND)
