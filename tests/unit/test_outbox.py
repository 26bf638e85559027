"""Merging in the outbox says the same as the messages it merges."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from llmserve.runtime.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    Logprobs,
    Message,
    PingReqOutput,
    StrRow,
    TokenIDRow,
)
from llmserve.runtime.outbox import Outbox, coalesce

PONG = PingReqOutput(step=1, state="ready")


def token_row(rid: str, tokens: int, total: int, **fields: object) -> TokenIDRow:
    return TokenIDRow(
        rid=rid,
        index=0,
        output_ids=bytes(range(total - tokens, total)),
        prompt_tokens=5,
        cached_tokens=0,
        completion_tokens=total,
        **fields,  # type: ignore[arg-type]
    )


def test_what_is_new_is_joined_and_what_is_a_total_is_the_last() -> None:
    end = FinishReason(type="stop", matched="x")
    prompt = Logprobs(token_logprobs=b"prompt")
    first = token_row(
        "a", 2, 2, logprobs=Logprobs(token_logprobs=b"AB", top=1, top_ids=b"CD", top_logprobs=b"EF"),
        prompt_logprobs=prompt, stop=("x",), min_new_tokens=3, skip_special_tokens=False, queue_s=0.5,
    )  # fmt: skip
    second = token_row(
        "a", 1, 3, logprobs=Logprobs(token_logprobs=b"a", top=1, top_ids=b"c", top_logprobs=b"e"), finish=end,
        skip_special_tokens=False, queue_s=0.5,
    )  # fmt: skip
    [merged] = coalesce([BatchTokenIDOutput(rows=(first,)), BatchTokenIDOutput(rows=(second,))])
    assert merged == BatchTokenIDOutput(
        rows=(
            TokenIDRow(
                rid="a",
                index=0,
                output_ids=b"\x00\x01\x02",
                prompt_tokens=5,
                cached_tokens=0,
                completion_tokens=3,
                finish=end,
                logprobs=Logprobs(token_logprobs=b"ABa", top=1, top_ids=b"CDc", top_logprobs=b"EFe"),
                prompt_logprobs=prompt,
                stop=("x",),
                min_new_tokens=3,
                skip_special_tokens=False,
                queue_s=0.5,
            ),
        )
    )


def test_choices_of_one_request_stay_apart() -> None:
    rows = tuple(msgspec.structs.replace(token_row("a", 1, 1), index=index) for index in range(3))
    assert list(coalesce([BatchTokenIDOutput(rows=rows[:2]), BatchTokenIDOutput(rows=rows[2:])])) == [
        BatchTokenIDOutput(rows=rows)
    ]


def test_other_messages_keep_their_place() -> None:
    before, after = (BatchTokenIDOutput(rows=(token_row("a", 1, total),)) for total in (1, 2))
    assert list(coalesce([before, PONG, after])) == [before, PONG, after]


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=3)), max_size=3), max_size=20))
def test_the_text_of_each_choice_stays_whole_and_in_order(batches: list[list[tuple[str, str]]]) -> None:
    totals = dict.fromkeys("abc", 0)
    messages = []
    for batch in batches:
        rows = []
        for rid, text in batch:
            totals[rid] += len(text)
            rows.append(
                StrRow(
                    rid=rid, index=0, text=text, output_ids=text.encode("utf-32-le", "surrogatepass"),
                    prompt_tokens=1, cached_tokens=0, completion_tokens=totals[rid],
                )
            )  # fmt: skip
        messages.append(BatchStrOutput(rows=tuple(rows)))
    merged = coalesce(messages)
    assert len(merged) == bool(messages)
    told = {row.rid: row for message in merged if isinstance(message, BatchStrOutput) for row in message.rows}
    for rid in "abc":
        text = "".join(text for batch in batches for owner, text in batch if owner == rid)
        if any(owner == rid for batch in batches for owner, _ in batch):
            assert (told[rid].text, told[rid].completion_tokens) == (text, totals[rid])
            assert told[rid].output_ids == text.encode("utf-32-le", "surrogatepass")
        else:
            assert rid not in told


def test_full_from_the_mark_until_empty() -> None:
    outbox = Outbox(mark=2)
    for _ in range(2):
        outbox.append(PONG)
    assert not outbox.full
    outbox.append(PONG)
    assert outbox.full
    while len(outbox) > 1:
        outbox.pop()
        assert outbox.full
    outbox.pop()
    assert not outbox.full


def test_above_the_mark_tokens_take_one_message() -> None:
    outbox = Outbox(mark=4)
    for total in range(1, 101):
        outbox.append(BatchTokenIDOutput(rows=(token_row("a", 1, total),)))
        assert len(outbox) <= 4
    waiting: list[Message] = []
    while outbox:
        waiting.append(outbox.head)
        outbox.pop()
    ids = b"".join(
        row.output_ids for message in waiting if isinstance(message, BatchTokenIDOutput) for row in message.rows
    )
    assert ids == bytes(range(100))


def test_a_batch_splits_into_halves_and_a_single_row_does_not() -> None:
    outbox = Outbox(mark=4)
    rows = tuple(token_row(rid, 1, 1) for rid in "abc")
    outbox.append(BatchTokenIDOutput(rows=rows))
    assert outbox.split()
    assert outbox.head == BatchTokenIDOutput(rows=rows[:1])
    assert not outbox.split()
    outbox.pop()
    assert outbox.head == BatchTokenIDOutput(rows=rows[1:])
