"""The table of requests: its columns, and the selection and order of its rows. Used by keys.py and by the view."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from llmserve.cli import format
from llmserve.cli.console import printable
from llmserve.cli.top.snapshot import Request, Snapshot

RequestKey = tuple[str, int, int]
"""What tells rows apart: rid, index, dp_rank."""


class Column(NamedTuple):
    """A column: the text of its cells, and its sort key. On narrow screens the columns of the highest `rank` are left
    out first.
    """

    name: str
    width: int
    rank: int
    cell: Callable[[Request], str]
    order: Callable[[Request], float | str]
    right: bool = True
    descending: bool = True
    """Whether it sorts the largest first, unless reversed."""


COLUMNS = (
    Column("RID", 18, 0, lambda r: rid_of(r), lambda r: r.rid, right=False, descending=False),
    Column("STATE", 7, 3, lambda r: r.state, lambda r: r.state, right=False, descending=False),
    Column("REPLICA", 7, 5, lambda r: str(r.dp_rank), lambda r: r.dp_rank, descending=False),
    Column("AGE", 6, 1, lambda r: format.duration(r.age_s), lambda r: r.age_s),
    Column("PROMPT", 7, 6, lambda r: format.number(r.prompt_tokens), lambda r: r.prompt_tokens),
    Column("CACHED", 7, 7, lambda r: format.number(r.cached_tokens), lambda r: r.cached_tokens),
    Column("OUTPUT", 11, 2, lambda r: output_of(r), lambda r: r.output_tokens),
    Column("TOK/S", 6, 4, lambda r: f"{r.tokens_per_s:.1f}", lambda r: r.tokens_per_s),
    Column("TTFT", 6, 8, lambda r: format.duration(r.ttft_s), lambda r: r.ttft_s or 0.0),
    Column("RETR", 4, 10, lambda r: str(r.retractions), lambda r: r.retractions),
    Column("USER", 10, 9, lambda r: printable(r.user) or "-", lambda r: r.user, right=False, descending=False),
)
BY_NAME = {column.name: column for column in COLUMNS}


def rid_of(request: Request) -> str:
    name = printable(request.rid)
    return f"{name} #{request.index}" if request.index else name


def output_of(request: Request) -> str:
    return f"{format.number(request.output_tokens)}/{format.number(request.max_new_tokens)}"


def key_of(request: Request) -> RequestKey:
    return request.rid, request.index, request.dp_rank


def arrange(requests: Iterable[Request], sort: str, reverse: bool, wanted: str) -> list[Request]:
    """The requests with `wanted` in their rid, user or state, sorted by column `sort`, then by rid."""
    wanted = wanted.lower()
    rows = [r for r in requests if not wanted or wanted in f"{r.rid}\n{r.user}\n{r.state}".lower()]
    column = BY_NAME[sort]
    rows.sort(key=key_of)
    rows.sort(key=column.order, reverse=column.descending != reverse)
    return rows


def columns_of(snapshot: Snapshot) -> list[Column]:
    """Those that say something: of one replica it goes without saying which has a request."""
    return [column for column in COLUMNS if column.name != "REPLICA" or len(snapshot.replicas) > 1]


def fitting(columns: Iterable[Column], width: int) -> list[Column]:
    """Those of the columns that fit into `width` cells, two spaces apart, the least important ones left out."""
    chosen = list(columns)
    while len(chosen) > 1 and sum(column.width + 2 for column in chosen) - 2 > width:
        chosen.remove(max(chosen, key=lambda column: column.rank))
    return chosen
