"""Token rows become text rows; the process around it over real sockets."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers

from instances import PATIENCE_S
from llmserve.runtime import detokenizer
from llmserve.runtime.child import Reporter
from llmserve.runtime.detokenizer import Detokenizer
from llmserve.runtime.engine.batch import int32_bytes
from llmserve.runtime.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    Heartbeat,
    Logprobs,
    Message,
    StrRow,
    SubscribeMetricsReqInput,
    TokenIDRow,
    TokenizerManagerInput,
)
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.tokenizer import Tokenizer
from llmserve.runtime.wire import Poller, Pull, Push

TOKENIZER = Tokenizer(small_tokenizers.byte_level(), {}, {})
LENGTH = FinishReason(type="length")
END = TOKENIZER.token_id("<|im_end|>")


def row(text: str | list[int], rid: str = "a", **fields: Any) -> TokenIDRow:
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    fields = {"index": 0, "prompt_tokens": 5, "cached_tokens": 2, "completion_tokens": len(ids), **fields}
    return TokenIDRow(rid=rid, output_ids=int32_bytes(ids), **fields)


def convert(detok: Detokenizer, *rows: TokenIDRow) -> list[StrRow]:
    return list(detok.convert(BatchTokenIDOutput(rows=rows)).rows)


def texts(detok: Detokenizer, *rows: TokenIDRow) -> list[str]:
    return [text_row.text for text_row in convert(detok, *rows)]


def test_a_row_keeps_everything_and_gains_its_text() -> None:
    logprobs = Logprobs(token_logprobs=b"1234", top=1, top_ids=b"5678", top_logprobs=b"9012")
    token_row = row("hé", index=3, completion_tokens=9, queue_s=0.5, logprobs=logprobs, prompt_logprobs=logprobs)
    (text_row,) = convert(Detokenizer(TOKENIZER), token_row)
    assert text_row.text == "hé"
    for name in set(StrRow.__struct_fields__) - {"text"}:
        assert getattr(text_row, name) == getattr(token_row, name)


def test_choices_are_decoded_apart_and_forgotten_at_their_end() -> None:
    detok = Detokenizer(TOKENIZER)
    start, *rest = TOKENIZER.encode("日")  # several tokens
    assert texts(detok, row([start], index=0), row([start], index=1), row([start], rid="b")) == ["", "", ""]
    assert texts(detok, row(rest, index=1, finish=LENGTH)) == ["日"]
    assert len(detok) == 2
    assert texts(detok, row(rest, index=0, finish=LENGTH), row([], rid="b", finish=LENGTH)) == ["日", "\ufffd"]
    assert len(detok) == 0


def test_a_stop_string_across_rows_is_trimmed() -> None:
    detok = Detokenizer(TOKENIZER)
    assert texts(detok, row("one EN", stop=("END",))) == ["one "]
    assert texts(detok, row("D two", finish=FinishReason(type="stop", matched="END"))) == [""]


def test_a_withheld_text_is_released_at_the_end() -> None:
    detok = Detokenizer(TOKENIZER)
    assert texts(detok, row("one EN", stop=("END",)), row("", finish=LENGTH)) == ["one ", "EN"]


def test_a_stop_string_before_the_minimum_stays() -> None:
    ids = TOKENIZER.encode("ab")
    detok = Detokenizer(TOKENIZER)
    assert texts(detok, row(ids, stop=("ab",), min_new_tokens=len(ids))) == ["ab"]
    assert texts(detok, row(ids, finish=FinishReason(type="stop", matched="ab"))) == [""]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("matched", [None, 7])
def test_the_token_that_ended_a_choice_is_not_text(skip: bool, matched: int | None) -> None:
    ids = [*TOKENIZER.encode("bye"), END if matched is None else matched]
    stopped = row(ids, finish=FinishReason(type="stop", matched=matched), skip_special_tokens=skip)
    assert texts(Detokenizer(TOKENIZER), stopped) == ["bye"]


def test_a_row_that_cannot_be_decoded_fails_alone() -> None:
    detok = Detokenizer(TOKENIZER)
    bad, good = convert(detok, row([-5], rid="bad"), row("fine", rid="good"))
    assert bad.finish is not None
    assert (bad.finish.type, bad.finish.status) == ("error", 500)
    assert (good.text, good.finish) == ("fine", None)
    assert convert(detok, row("x", rid="bad"), row("y", rid="bad", finish=LENGTH)) == []
    assert len(detok) == 1


class Ready(Reporter):
    def __init__(self) -> None:
        self.event = threading.Event()

    def ready(self, **facts: object) -> None:
        self.event.set()


def run_process(directory: Path, rows: Sequence[TokenIDRow] = ()) -> tuple[Pull, Push]:
    """The detokenizer in a thread, `rows` being there before it starts: its front's socket, and its scheduler's."""
    ports = PortArgs.init_new(directory)
    checkpoint: Any = type("Checkpoint", (), {"tokenizer_dir": str(directory)})
    small_tokenizers.save(small_tokenizers.byte_level(), directory)
    front = Pull(ports.tokenizer_ipc_name, TokenizerManagerInput)
    scheduler = Push(ports.detokenizer_ipc_name)
    for token_row in rows:
        scheduler.send(BatchTokenIDOutput(rows=(token_row,)))
    init: Any = type("Init", (), {"ports": ports, "checkpoint": checkpoint})
    ready = Ready()
    threading.Thread(target=detokenizer.run, args=(init, ready), daemon=True).start()
    assert ready.event.wait(PATIENCE_S)
    return front, scheduler


def messages_until(front: Pull, last: Callable[[Message], bool]) -> list[Message]:
    """What the front is sent, up to the message that is `last`."""
    received: list[Message] = []
    poller = Poller(front)
    deadline = time.monotonic() + PATIENCE_S
    while not received or not last(received[-1]):
        assert time.monotonic() < deadline
        message = front.recv()
        if message is None:
            poller.wait(1.0)
        else:
            received.append(message)
    return received


def test_the_process_passes_rows_on_in_order(tmp_path: Path) -> None:
    front, scheduler = run_process(tmp_path)

    lease = SubscribeMetricsReqInput(endpoint="top.sock")
    sent = [row(f"word {number}", rid=str(number), finish=LENGTH) for number in range(50)]
    for token_row in sent:
        scheduler.send(BatchTokenIDOutput(rows=(token_row,)))
    scheduler.send(lease)

    received = messages_until(front, lambda message: message == lease)
    rows = [text_row for batch in received if isinstance(batch, BatchStrOutput) for text_row in batch.rows]
    assert [text_row.text for text_row in rows] == [f"word {number}" for number in range(50)]
    assert received[-1] == lease


def test_the_process_says_that_it_lives_idle_or_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenizer, "HEARTBEAT_S", 0.001)
    rows = [row("some words", rid=str(number), finish=LENGTH) for number in range(300)]
    front, _ = run_process(tmp_path, rows)

    def is_last(message: Message) -> bool:
        return isinstance(message, BatchStrOutput) and message.rows[0].rid == "299"

    busy = messages_until(front, is_last)
    first = next(number for number, message in enumerate(busy) if isinstance(message, BatchStrOutput))
    assert Heartbeat() in busy[first:]
    idle = iter(range(5))
    assert set(messages_until(front, lambda _: next(idle) == 4)) == {Heartbeat()}
