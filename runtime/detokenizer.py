"""The detokenizer process: token rows from the scheduler become text rows for the TokenizerManager.

It keeps one IncrementalDecoder per choice, from its first row to its last. Embeddings bypass it.
"""

import logging
import time

from llmserve.runtime.child import ChildInit, Reporter
from llmserve.runtime.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    DetokenizerInput,
    FinishReason,
    Heartbeat,
    StrRow,
    TokenIDRow,
)
from llmserve.runtime.tokenizer import IncrementalDecoder, Tokenizer
from llmserve.runtime.wire import Poller, Pull, Push

log = logging.getLogger(__name__)

CONGESTED_WAIT_S = 0.005
HEARTBEAT_S = 1.0


def run(init: ChildInit, report: Reporter) -> None:
    """Serves until the process is ended."""
    detokenizer = Detokenizer(Tokenizer.load(init.checkpoint.tokenizer_dir))
    pull = Pull(init.ports.detokenizer_ipc_name, DetokenizerInput)
    push = Push(init.ports.tokenizer_ipc_name)
    poller = Poller(pull)
    report.ready()
    beat_due = 0.0
    while True:
        now = time.monotonic()
        if now >= beat_due:
            push.offer(Heartbeat())
            beat_due = now + HEARTBEAT_S
        # While the front does not keep up, nothing is read, so that the scheduler notices and admits no requests.
        message = None if push.congested else pull.recv()
        if isinstance(message, BatchTokenIDOutput):
            push.send(detokenizer.convert(message))
        elif message is not None:
            push.send(message)
        elif not push.flush():
            poller.wait(CONGESTED_WAIT_S)
        else:
            poller.wait(beat_due - now)


class Detokenizer:
    """Decodes the tokens of every choice that is being generated."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders: dict[tuple[str, int], IncrementalDecoder | None] = {}
        """By rid and index. None: decoding has failed and ended the choice; its further rows are dropped."""

    def __len__(self) -> int:
        return len(self._decoders)

    def convert(self, batch: BatchTokenIDOutput) -> BatchStrOutput:
        """The rows with their text. A row that cannot be decoded ends its own choice with an error, but no other
        choice.
        """
        rows = (self._convert(row) for row in batch.rows)
        return BatchStrOutput(rows=tuple(row for row in rows if row is not None))

    def _convert(self, row: TokenIDRow) -> StrRow | None:
        key = (row.rid, row.index)
        finish = row.finish
        text = ""
        try:
            if key in self._decoders:
                decoder = self._decoders[key]
            else:
                decoder = IncrementalDecoder(self._tokenizer, row.skip_special_tokens, row.stop, row.min_new_tokens)
                self._decoders[key] = decoder
            if decoder is None:
                return None
            ids = memoryview(row.output_ids).cast("i").tolist()
            text = decoder.add(without_stop_token(ids, finish))
            if finish is not None:
                text += decoder.finish()
        except Exception:
            log.exception("cannot decode rid=%s index=%d", row.rid, row.index)
            finish = FinishReason(type="error", status=500, message="the generated tokens cannot be decoded")
            self._decoders[key] = None
        finally:
            if row.finish is not None:
                del self._decoders[key]
        return StrRow(
            rid=row.rid,
            index=row.index,
            text=text,
            output_ids=row.output_ids,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            completion_tokens=row.completion_tokens,
            finish=finish,
            logprobs=row.logprobs,
            prompt_logprobs=row.prompt_logprobs,
            queue_s=row.queue_s,
        )


def without_stop_token(ids: list[int], finish: FinishReason | None) -> list[int]:
    """The ids without the stop token that ended the choice, which is not part of the text."""
    if finish is not None and finish.type == "stop" and not isinstance(finish.matched, str):
        return ids[:-1]
    return ids
