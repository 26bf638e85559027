"""How long a step may take: the budget of prompts is learnt from the time that steps take."""

import pytest
from fake_worker import FakeHandle, FakeWorker
from scheduler_harness import Harness, prompt_of

from llmserve.runtime.engine.batch import StepPlan
from llmserve.runtime.messages import SamplingParams
from llmserve.runtime.scheduler.pace import Pace

BASE_S, DECODE_S, TOKEN_S = 0.003, 0.0006, 0.0004
LONG = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)


def cost(decodes: int, tokens: int) -> float:
    return BASE_S + DECODE_S * decodes + TOKEN_S * tokens


def learnt(times: int = 60) -> Pace:
    """One that has seen steps of all kinds."""
    pace = Pace(16, 512)
    for _ in range(times):
        for decodes, tokens in ((0, 512), (1, 0), (8, 256), (40, 0), (40, 100), (60, 64)):
            pace.observe(decodes, tokens, cost(decodes, tokens))
    return pace


def test_before_it_knows_anything_the_budget_is_the_whole_one() -> None:
    assert Pace(16, 512).budget(8) == 512


@pytest.mark.parametrize("decodes", [1, 8, 40])
def test_a_step_is_planned_to_take_a_tenth_of_a_second(decodes: int) -> None:
    assert cost(decodes, learnt().budget(decodes)) == pytest.approx(0.1, rel=0.1)


def test_where_decodes_take_longer_than_that_prompts_get_as_much_time_as_they() -> None:
    decodes = 200
    assert cost(decodes, learnt().budget(decodes)) == pytest.approx(2 * cost(decodes, 0), rel=0.1)


def test_a_page_is_computed_at_any_cost_and_no_more_than_a_chunk() -> None:
    slow, fast = Pace(16, 512), Pace(16, 512)
    for _ in range(20):
        slow.observe(1, 512, 512 * 0.05)
        fast.observe(1, 512, 0.01)
    assert slow.budget(1) == 16
    assert fast.budget(1) == 512


def test_it_follows_a_machine_that_has_become_slower() -> None:
    pace = learnt()
    for _ in range(10):
        tokens = pace.budget(4)
        pace.observe(4, tokens, 5 * cost(4, tokens))
    assert 5 * cost(4, pace.budget(4)) == pytest.approx(0.1, rel=0.1)


def test_a_step_that_was_held_up_is_forgotten_soon() -> None:
    pace = learnt()
    before = pace.budget(8)
    pace.observe(8, before, 30.0)
    assert before / 2 < pace.budget(8) < before
    for _ in range(4):
        tokens = pace.budget(8)
        pace.observe(8, tokens, cost(8, tokens))
    assert pace.budget(8) == pytest.approx(before, rel=0.1)


class TimedWorker(FakeWorker):
    """Its steps take their time on the harness's clock."""

    harness: Harness

    def submit(self, plan: StepPlan) -> FakeHandle:
        lengths = [len(row.token_ids) // 4 for row in plan.rows]
        decodes = lengths.count(1)
        self.steps.append((decodes, sum(lengths) - decodes))
        self.harness.clock += cost(*self.steps[-1])
        return super().submit(plan)

    def __init__(self) -> None:
        super().__init__(num_pages=4000)
        self.steps: list[tuple[int, int]] = []
        """The decodes and the other tokens of each."""


def test_long_prompts_are_computed_in_smaller_parts_while_others_decode() -> None:
    worker = TimedWorker()
    worker.harness = harness = Harness(worker, chunked_prefill_size=512)
    harness.send("crawler0", prompt_of(3000, 1), params=SamplingParams(max_new_tokens=1, ignore_eos=True))
    harness.run()
    assert [tokens for _, tokens in worker.steps] == [512] * 5 + [440]  # nobody waits for a token
    for i in range(4):
        harness.send(f"chat{i}", prompt_of(20, 10 + i), params=LONG)
    for _ in range(20):
        harness.turn()
    del worker.steps[:]
    harness.send("crawler1", prompt_of(3000, 2), params=SamplingParams(max_new_tokens=1, ignore_eos=True))
    harness.run()
    chunks = [(decodes, tokens) for decodes, tokens in worker.steps if tokens]
    assert sum(tokens for _, tokens in chunks) == 3000
    assert {decodes for decodes, _ in chunks} == {4}
    durations = [cost(*chunk) for chunk in chunks[:-1]]
    assert max(durations) < 0.13
    assert durations[-1] == pytest.approx(0.1, rel=0.1)
    assert harness.output("crawler1") == harness.expected(prompt_of(3000, 2), SamplingParams(max_new_tokens=1))
