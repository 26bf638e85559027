"""Masks against a naive check, on every kind of tokenizer; what becomes of requests whose text follows a grammar."""

import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_tokenizers
from fake_worker import FakeWorker
from llguidance import LLMatcher, LLTokenizer
from scheduler_harness import Harness, prompt_of
from tokenizers import Tokenizer as Backend

from instances import PATIENCE_S
from llmserve.runtime.grammar import grammar_of
from llmserve.runtime.messages import AbortReqInput, Constraint, SamplingParams
from llmserve.runtime.scheduler.guides import GrammarError, Guide, Guides, Program, vocabulary_of
from llmserve.runtime.tokenizer import Tokenizer


def regex(text: str) -> str:
    return grammar_of(Constraint(kind="regex", text=text, param=""))


def loaded(backend: Backend, directory: Path) -> tuple[Tokenizer, int]:
    """A tokenizer, and the token that ends a text: one of its special ones."""
    tokenizer = Tokenizer.load(small_tokenizers.save(backend, directory))
    return tokenizer, max(tokenizer.special_ids)


def allowed(mask: bytes) -> list[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return tokens


# ---- masks -----------------------------------------------------------------------------------------------------------


def begins_a_match(text: bytes) -> bool:
    """Whether some continuation of `text` matches `x(a|b)*( the)?é`."""
    whole = [b"x" + middle + the + "é".encode() for middle in _middles(len(text)) for the in (b"", b" the")]
    return any(match.startswith(text) for match in whole)


def _middles(length: int) -> list[bytes]:
    found, last = [b""], [b""]
    for _ in range(min(length, 5)):
        last = [each + letter for each in last for letter in (b"a", b"b")]
        found += last
    return found


@pytest.mark.parametrize(
    "make",
    [
        small_tokenizers.byte_level,
        lambda: small_tokenizers.sentencepiece(strip=True),
        lambda: small_tokenizers.sentencepiece(strip=False),
    ],
    ids=["byte-level", "sentencepiece-strip", "sentencepiece"],
)
def test_a_mask_is_what_a_naive_check_of_every_token_finds(make: Callable[[], Backend], tmp_path: Path) -> None:
    tokenizer, end = loaded(make(), tmp_path)
    size = tokenizer.vocab_size + 7  # a model may have logits for tokens that its tokenizer does not have
    program = Program(LLMatcher(vocabulary_of(tokenizer, size, [end]), regex("x(a|b)*( the)?é"), log_level=0))
    for seed in range(4):
        guide, draw, text = Guide(program), random.Random(seed), b""
        for _ in range(5):
            found = allowed(guide.mask(()))
            naive = [
                token
                for token in range(size)
                if token not in tokenizer.special_ids
                and (data := tokenizer.token_bytes(token))
                and begins_a_match(text + data)
            ]
            ends = (
                [end] if re.fullmatch("x[ab]*( the)?é", text.decode("utf-8", "ignore")) and text[-1:] != b"\xc3" else []
            )
            # Where only one text can follow it may be asked for in the tokens that the tokenizer would make of it.
            assert set(found) <= {*naive, *ends}
            assert len(found) == len({*naive, *ends}) or len({tokenizer.token_bytes(t)[:1] for t in naive}) <= 1
            if ends:
                break
            token = draw.choice(found)
            guide.advance(token)
            text += tokenizer.token_bytes(token)


@pytest.mark.parametrize(
    "make",
    [
        small_tokenizers.byte_level,
        lambda: small_tokenizers.sentencepiece(strip=True),
        lambda: small_tokenizers.sentencepiece(strip=False),
    ],
    ids=["byte-level", "sentencepiece-strip", "sentencepiece"],
)
def test_whatever_is_drawn_the_decoded_text_matches(make: Callable[[], Backend], tmp_path: Path) -> None:
    tokenizer, end = loaded(make(), tmp_path)
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, [end])
    for pattern in ("the a( the| a){3}[0-9]{3}é日?", r'\{"naïve": (true|false), "x": "[a-z ]{2,9}"\}'):
        program = Program(LLMatcher(vocabulary, regex(pattern), log_level=0))
        for seed in range(5):
            guide, draw, ids = Guide(program), random.Random(seed), []
            while (token := draw.choice(allowed(guide.mask(())))) != end:
                guide.advance(token)
                ids.append(token)
            assert re.fullmatch(pattern, tokenizer.decode(ids))


def test_where_only_the_end_can_follow_it_is_allowed_although_unwanted(tmp_path: Path) -> None:
    tokenizer, end = loaded(small_tokenizers.byte_level(), tmp_path)
    guide = Guide(Program(LLMatcher(vocabulary_of(tokenizer, tokenizer.vocab_size, [end]), regex("ab?"), log_level=0)))
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    guide.advance(a)
    assert set(allowed(guide.mask(()))) == {b, end}
    assert allowed(guide.mask({end})) == [b]
    guide.advance(b)
    assert allowed(guide.mask({end})) == [end]


# ---- grammars that are kept ------------------------------------------------------------------------------------------


@pytest.fixture
def guides(tmp_path: Path) -> Guides:
    tokenizer, end = loaded(small_tokenizers.byte_level(), tmp_path)
    return Guides(lambda: vocabulary_of(tokenizer, tokenizer.vocab_size, [end]))


def test_a_grammar_is_compiled_once(guides: Guides) -> None:
    program = guides.program(regex("a"))
    assert guides.program(regex("a")) is program
    assert guides.program(regex("b")) is not program


def test_the_grammars_that_were_used_last_are_kept(guides: Guides) -> None:
    first, second = guides.program(regex("first")), guides.program(regex("second"))
    for number in range(63):
        guides.program(regex(f"x{number}")).result()
        guides.program(regex("first"))
    assert guides.program(regex("first")) is first
    assert guides.program(regex("second")) is not second


def test_of_large_grammars_fewer_are_kept(guides: Guides) -> None:
    first = guides.program(regex("first"))
    for number in range(9):
        guides.program(regex(f"{number}" + "a" * 130_000)).result()
    assert guides.program(regex("first")) is not first


def test_one_that_has_met_a_limit_is_compiled_anew(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    program = guides.program(regex("a{100000000}")).result()
    guide = Guide(program)
    with pytest.raises(GrammarError, match="cannot be followed"):  # noqa: PT012
        for _ in range(100):
            guide.advance(allowed(guide.mask(()))[0])
    assert program.spent
    again = guides.program(regex("a{100000000}")).result()
    assert again is not program
    Guide(again).mask(())


# ---- in the scheduler ------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=60)


class Letters:
    """A harness whose model writes noise in the tokens of a byte-level tokenizer."""

    def __init__(self, directory: Path, depth: int = 1, compiles: bool = True, **options: object) -> None:
        self.tokenizer, self.end = loaded(small_tokenizers.byte_level(), directory)
        size = self.tokenizer.vocab_size
        self.may_compile = threading.Event()
        if compiles:
            self.may_compile.set()

        def vocabulary() -> LLTokenizer:
            self.may_compile.wait(PATIENCE_S)
            return vocabulary_of(self.tokenizer, size, [self.end])

        worker = FakeWorker(vocab_size=size, eos_token_ids=(self.end,), num_pages=int(options.pop("pages", 64)))  # type: ignore[call-overload]
        self.harness = Harness(worker, depth, Guides(vocabulary), **options)

    def run(self) -> None:
        """Until nothing happens and no grammar is being compiled."""
        deadline = time.monotonic() + PATIENCE_S
        while self.harness.turn() or self.harness.scheduler.guides.poll():
            assert time.monotonic() < deadline

    def text(self, rid: str, index: int = 0) -> str:
        ids = self.harness.output(rid, index)
        assert ids[-1] == self.end or self.harness.finish(rid, index).type == "length"
        return self.tokenizer.decode(ids)


@pytest.fixture
def letters(tmp_path: Path) -> Letters:
    return Letters(tmp_path)


def test_a_request_follows_its_grammar_and_ends_with_it(letters: Letters) -> None:
    letters.harness.send("a", prompt_of(5), params=GREEDY, grammar=regex("x[0-9]{3}"))
    letters.harness.send("free", prompt_of(6), params=GREEDY)
    letters.run()
    assert re.fullmatch("x[0-9]{3}", letters.text("a"))
    assert letters.harness.finish("a").type == "stop"
    assert letters.harness.output("free") == letters.harness.expected(prompt_of(6), GREEDY), "others are as without it"
    letters.harness.check_empty()


def test_each_choice_has_its_own_place_in_the_grammar(letters: Letters) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=40)
    letters.harness.send("a", prompt_of(5), prompt_of(9, 1), n=3, params=params, grammar=regex("x[0-9]{6}"))
    letters.run()
    texts = [letters.text("a", index) for index in range(6)]
    assert all(re.fullmatch("x[0-9]{6}", text) for text in texts)
    assert len(set(texts)) > 1


def test_retraction_and_many_in_flight_change_nothing(tmp_path: Path) -> None:
    alone = Letters(tmp_path)
    pattern = "([a-z]{3} ){12}"
    for number in range(6):
        alone.harness.send(f"r{number}", prompt_of(9, number), params=GREEDY, grammar=regex(pattern))
        alone.run()
    for depth in (1, 3):
        crowded = Letters(tmp_path, depth, pages=14, chunked_prefill_size=8)
        crowded.harness.scheduler.pause("retract")  # until all grammars are compiled
        for number in range(6):
            crowded.harness.send(f"r{number}", prompt_of(9, number), params=GREEDY, grammar=regex(pattern))
        crowded.run()
        crowded.harness.scheduler.resume()
        crowded.run()
        assert crowded.harness.scheduler.results.counters.retractions > 0
        for number in range(6):
            assert re.fullmatch(pattern, crowded.text(f"r{number}"))
            assert crowded.harness.output(f"r{number}") == alone.harness.output(f"r{number}")
        crowded.harness.check_empty()


def test_min_tokens_and_ignore_eos_hold_while_the_grammar_goes_on(letters: Letters) -> None:
    for rid, params in {
        "early": SamplingParams(temperature=0.0, max_new_tokens=40),
        "min": SamplingParams(temperature=0.0, max_new_tokens=40, min_new_tokens=12),
        "ignore": SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True),
        "must": SamplingParams(temperature=0.0, max_new_tokens=40, min_new_tokens=12, ignore_eos=True),
    }.items():
        letters.harness.send(rid, prompt_of(5), params=params, grammar=regex("(ab)*" if rid != "must" else "(ab){2}"))
    letters.run()
    assert letters.harness.finish("min").type in ("stop", "length")
    assert len(letters.harness.output("min")) > 12
    assert letters.harness.finish("ignore").type == "length"
    assert len(letters.harness.output("ignore")) == 40
    assert letters.text("must") == "abab", "nothing else can follow"
    assert letters.harness.finish("must").type == "stop"


def test_a_limit_on_tokens_cuts_it(letters: Letters) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=3)
    letters.harness.send("a", prompt_of(5), params=params, grammar=regex("[0-9]{9}"))
    letters.run()
    assert letters.harness.finish("a").type == "length"
    assert re.fullmatch("[0-9]{3,}", letters.text("a"))


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(letters: Letters) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=400)
    letters.harness.send("bad", prompt_of(5), params=params, grammar=regex("a{100000000}"))
    letters.harness.send("broken", prompt_of(5), params=params, grammar="start: nowhere")
    letters.harness.send("good", prompt_of(7), params=GREEDY, grammar=regex("x[0-9]{3}"))
    letters.run()
    for rid in ("bad", "broken"):
        assert (letters.harness.finish(rid).type, letters.harness.finish(rid).status) == ("error", 400)
        assert "grammar" in letters.harness.finish(rid).message
    assert letters.harness.finish("good").type == "stop"
    letters.harness.check_empty()


def test_others_go_on_while_a_grammar_is_compiled_and_it_can_be_aborted(tmp_path: Path) -> None:
    letters = Letters(tmp_path, compiles=False)
    letters.harness.send("waits", prompt_of(5), params=GREEDY, grammar=regex("x"))
    letters.harness.send("left", prompt_of(5), params=GREEDY, grammar=regex("y"))
    letters.harness.send("free", prompt_of(6), params=GREEDY)
    while letters.harness.turn():
        pass
    assert letters.harness.finish("free")
    assert not letters.harness.rows("waits")
    assert letters.harness.scheduler.guides.poll()
    assert letters.harness.scheduler.snapshots.metrics().compiling == 2
    aborted, _ = letters.harness.scheduler.abort(AbortReqInput(rids=("left",)))
    assert aborted == ["left"]
    letters.harness.turn()
    assert letters.harness.finish("left").type == "abort"
    letters.may_compile.set()
    letters.run()
    assert letters.text("waits") == "x"
    assert letters.harness.scheduler.snapshots.metrics().compiling == 0
    letters.harness.check_empty()
