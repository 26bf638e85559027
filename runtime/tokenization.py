"""Turns a client's request into the scheduler's: validated, tokenized, with every default resolved.

It knows neither other requests nor sockets, which are the business of tokenizer_manager.py.
"""

import asyncio
import random
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from llmserve.runtime import validation
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.grammar import grammar_of
from llmserve.runtime.messages import (
    UNSEEDED,
    Constraint,
    EmbeddingReqInput,
    GenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenizedReqInput,
)
from llmserve.runtime.models.configs import ModelConfig
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.tokenizer import Tokenizer
from llmserve.runtime.validation import Limits

INLINE_TEXT_LENGTH = 4096
"""Texts up to this many characters are tokenized in the event loop, within a millisecond; longer ones in a thread."""
THREADS = 2
SHOWN_TEXT_LENGTH = 200

Prompts = Sequence[Sequence[int]]


class Tokenization:
    """Validates and tokenizes requests for one model, within its `limits`."""

    def __init__(self, args: ServerArgs, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.limits = Limits(
            vocab_size=config.vocab_size, max_model_len=args.max_model_len or config.max_position_embeddings
        )
        self._can_end = bool(config.eos_token_ids)
        self._seeds = random.Random(args.seed)
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, req: GenerateReqInput | EmbeddingReqInput) -> TokenizedReqInput:
        """The request for the scheduler. Raises RequestError 400."""
        if isinstance(req, EmbeddingReqInput):
            return await self._embedding(req)
        return await self._generation(req)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, param: str) -> list[list[int]]:
        """The token ids of each text. Raises RequestError 400, naming `param`, for one that cannot fit into the
        context.
        """
        for text in texts:
            if len(text) > self.limits.max_model_len:
                validation.check_text_length(text, self.limits, self._tokenizer.longest_token, param)
        if sum(map(len, texts)) <= INLINE_TEXT_LENGTH:
            return self._tokenizer.encode_batch(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._tokenizer.encode_batch, texts, add_special_tokens)

    async def _embedding(self, req: EmbeddingReqInput) -> TokenizedEmbeddingReqInput:
        validation.check_embedding_before_tokenizing(req)
        prompts = await self._prompts(req, add_special_tokens=True, room=0)
        return TokenizedEmbeddingReqInput(
            rid=req.rid,
            prompts=_packed(prompts),
            pooling=req.pooling,
            normalize=req.normalize,
            user=req.user,
            text=_shown_text(req),
        )

    async def _generation(self, req: GenerateReqInput) -> TokenizedGenerateReqInput:
        validation.check_before_tokenizing(req, self.limits)
        params = req.sampling_params
        prompts = await self._prompts(req, req.add_special_tokens, room=int(params.max_new_tokens != 0))
        grammar = await self._grammar(req.constraint)
        params = msgspec.structs.replace(
            params,
            max_new_tokens=validation.resolve_max_new_tokens(params, max(map(len, prompts)), self.limits),
            seed=self._seeds.getrandbits(62) if params.seed == UNSEEDED else params.seed,
        )
        return TokenizedGenerateReqInput(
            rid=req.rid,
            prompts=_packed(prompts),
            sampling_params=params,
            n=req.n,
            grammar=grammar,
            logprobs=req.logprobs,
            stream=req.stream,
            skip_special_tokens=req.skip_special_tokens,
            user=req.user,
            text=_shown_text(req),
        )

    async def _prompts(self, req: GenerateReqInput | EmbeddingReqInput, add_special_tokens: bool, room: int) -> Prompts:
        """The token ids of each prompt. Raises RequestError 400 unless each leaves `room` tokens of the context."""
        param = validation.prompt_param(req)
        prompts: Prompts = await self.encode(req.texts, add_special_tokens, param) if req.texts else req.input_ids
        validation.check_prompts(prompts, self.limits, param, room)
        return prompts

    async def _grammar(self, constraint: Constraint | None) -> str:
        if constraint is None:
            return ""
        if not self._can_end:
            raise RequestError(
                400, "the model names no token that ends a text, as a grammar needs", param=constraint.param
            )
        return await asyncio.get_running_loop().run_in_executor(self._threads, grammar_of, constraint)


def _packed(prompts: Prompts) -> tuple[bytes, ...]:
    return tuple(array("i", ids).tobytes() for ids in prompts)


def _shown_text(req: GenerateReqInput | EmbeddingReqInput) -> str:
    """The start of the first prompt, for `llmserve requests --show-text`."""
    return req.texts[0][:SHOWN_TEXT_LENGTH] if req.texts else ""
