"""Guides: the tokens that may come next in a sequence whose text must match a grammar.

Grammars are compiled in threads, so that no step waits for one, and cached.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llmserve.runtime.grammar import LIMITS, told
from llmserve.runtime.tokenizer import Tokenizer

THREADS = 2
KEPT_GRAMMARS = 64
KEPT_LENGTH = 1 << 20
"""Characters of all cached grammars together; a compiled one takes up to a few hundred bytes per character."""


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot be followed any further. The text is for the client."""


class Program:
    """A compiled grammar, shared by the guides of many sequences."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Raises GrammarError."""
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be used: {told(matcher.get_error())}")
        self.matcher = matcher
        self.spent = False
        """Whether it has reached a limit on its lexer states, after which no guide can use it."""


class Guide:
    """The state of one sequence in its grammar. It must be told every generated token."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._matcher = program.matcher.deep_copy()

    def mask(self, unwanted: Collection[int]) -> bytes:
        """A mask of the tokens that may come next, one bit per token id, least significant first. Raises GrammarError.

        Where the text may end, it includes the EOS tokens. `unwanted` tokens are removed, unless no other token is
        left.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        if unwanted:
            wanted = bytearray(mask)
            for token in unwanted:
                wanted[token >> 3] &= ~(1 << (token & 7))
            if wanted.count(0) < len(wanted):
                return bytes(wanted)
        return mask

    def advance(self, token: int) -> None:
        """Takes the next token of the sequence. Raises GrammarError if the grammar does not allow it."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._program.spent = True
            raise GrammarError(f"the grammar cannot be followed here: {told(self._matcher.get_error())}")


class Guides:
    """Compiles grammars, and caches those that were used last."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer]) -> None:
        """`vocabulary` is called at once, in a thread. It takes a fraction of a second, during which steps are
        slower.
        """
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._vocabulary = self._threads.submit(vocabulary)
        self._kept: OrderedDict[str, Future[Program]] = OrderedDict()
        self._compiling: list[Future[Program]] = []

    def program(self, grammar: str) -> "Future[Program]":
        """A future of the compiled grammar, whose result may raise GrammarError."""
        future = self._kept.get(grammar)
        if future is None or (future.done() and (future.exception() is not None or future.result().spent)):
            future = self._kept[grammar] = self._threads.submit(self._compile, grammar)
            self._compiling.append(future)
        self._kept.move_to_end(grammar)
        while len(self._kept) > KEPT_GRAMMARS or (sum(map(len, self._kept)) > KEPT_LENGTH and len(self._kept) > 1):
            self._kept.popitem(last=False)
        return future

    @property
    def compiling(self) -> int:
        """How many grammars are being compiled, or wait for a thread that is to compile them."""
        return sum(not future.done() for future in self._compiling)

    def poll(self) -> bool:
        """Whether a grammar was being compiled at the last call. If so, requests that wait for it must be looked at
        again.
        """
        before, self._compiling = self._compiling, [future for future in self._compiling if not future.done()]
        return bool(before)

    def _compile(self, grammar: str) -> Program:
        return Program(LLMatcher(self._vocabulary.result(), grammar, limits=LIMITS, log_level=0))


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """The vocabulary of a model with `vocab_size` logits, for llguidance."""
    return LLTokenizer(
        TokenizerWrapper(_Tokens(tokenizer, vocab_size, list(eos_token_ids))), eos_token=[*eos_token_ids]
    )


class _Tokens:
    """The tokenizer interface that llguidance requires. Special tokens match no text; a grammar can name them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        special = tokenizer.special_ids | set(eos_token_ids)
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._ids = {self.tokens[token]: token for token in range(vocab_size) if token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text in the middle of another one. Many tokenizers add a space at the beginning of a text."""
        data = text.encode()
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            while ids:
                if b"".join(self.tokens[token] for token in ids) == data:
                    return ids
                ids = ids[1:] if before else []
        return self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """Greedy longest-match tokens of a text, up to the first byte that no token begins with."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (token := self._ids.get(data[start:end])) is not None:
                    ids.append(token)
                    start = end
                    break
            else:
                break
        return ids
