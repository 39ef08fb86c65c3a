"""With drafts every answer is that of a run without: tokens, log probabilities, ends, KV."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from engine.request import Stage
from kvferry.config import SchedulerConfig
from kvferry.errors import InvalidInput
from kvferry.generation import FinishReason
from kvferry.sampling import Constraint, ConstraintKind
from tests.support.digest_model import EOS, answer
from tests.support.draft_oracle import knowing
from tests.support.engine_bench import EngineBench, Recorder, name_of
from tests.support.small_tokenizer import SmallVocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.constraint import Outlook
    from engine.request import Request
    from kvferry.generation import OutputToken

PROMPT = list(range(20, 41))
STOPS = tuple(range(40))
DRAWN = {"temperature": 3.0, "max_tokens": 24}
CASES: dict[str, dict[str, object]] = {
    "greedy": {"max_tokens": 40},
    "drawn": DRAWN | {"seed": 5},
    "narrow": DRAWN | {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "penalties": DRAWN
    | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias": DRAWN | {"logit_bias": {30: 6.0, 31: -5.0}, "seed": 8},
    "logprobs": DRAWN | {"logprobs": 3, "seed": 9},
    "stop": DRAWN | {"stop_token_ids": STOPS, "seed": 10},
    "min_tokens": DRAWN | {"stop_token_ids": STOPS, "min_tokens": 9, "seed": 11},
    "eos": DRAWN | {"ignore_eos": False, "logit_bias": {EOS: 7.0}, "seed": 12},
    "samples": DRAWN | {"n": 3, "seed": 13},
    "one": {"max_tokens": 1},
    "two": {"max_tokens": 2},
}


class FullRecorder(Recorder):
    """Remembers all of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[OutputToken]] = {}

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        super().tokens(request, tokens)
        for sample, token in enumerate(tokens, request.sample):
            self.outputs.setdefault(name_of(request, sample), []).append(token)


def _answer_all(bench: EngineBench, cases: dict[str, dict[str, object]]) -> FullRecorder:
    recorder = FullRecorder()
    bench.recorder = recorder
    recorder.engine = bench.engine
    for number, (name, options) in enumerate(cases.items()):
        bench.submit(name, [*PROMPT, number], **options)
    bench.run(steps_max=2000)
    bench.assert_idle()
    return recorder


@pytest.fixture(scope="module")
def undisturbed() -> FullRecorder:
    """The answers to `CASES`."""
    bench = EngineBench(num_slots=2048, rows=32, auditing=False)
    return _answer_all(bench, CASES)


def _assert_same(got: FullRecorder, expected: FullRecorder) -> None:
    assert got.told == expected.told
    assert got.ends == expected.ends
    for name, tokens in expected.outputs.items():
        for own, other in zip(got.outputs[name], tokens, strict=True):
            assert (own.logprobs is None) == (other.logprobs is None)
            if own.logprobs is not None and other.logprobs is not None:
                assert own.logprobs.logprob == pytest.approx(other.logprobs.logprob)
                assert [i for i, _ in own.logprobs.top] == [i for i, _ in other.logprobs.top]


@pytest.mark.parametrize(
    ("page_size", "num_slots", "max_draft"), [(4, 160, 4), (16, 2048, 8), (1, 90, 3)]
)
def test_answers_are_those_of_a_run_without_drafts(undisturbed, page_size, num_slots, max_draft):
    drafts = knowing(undisturbed.told, random.Random(page_size), max_draft)
    bench = EngineBench(
        page_size=page_size,
        num_slots=num_slots,
        rows=32,
        scheduler=SchedulerConfig(output_reserve=0.0),
        drafts=drafts,
    )
    _assert_same(_answer_all(bench, CASES), undisturbed)
    drafted, accepted = drafts.counters["draft_tokens"], drafts.counters["draft_tokens_accepted"]
    assert 0 < accepted < drafted
    assert (bench.engine.scheduler.counters["retractions"] > 0) == (num_slots < 200)


def test_a_window_slides_under_drafts():
    def run(**options: object) -> tuple[EngineBench, FullRecorder]:
        bench = EngineBench(page_size=4, window=12, rows=4, **options)
        return bench, _answer_all(bench, {"long": {"max_tokens": 60}})

    _, expected = run()
    bench, got = run(drafts=knowing(expected.told, random.Random(1)))
    _assert_same(got, expected)
    assert bench.engine.steps < 45


def test_right_guesses_save_steps():
    expected = answer(PROMPT, 41)
    bench = EngineBench(drafts=knowing({"r": expected}))
    bench.submit("r", PROMPT, max_tokens=41)
    bench.run()
    assert bench.recorder.told["r"] == expected
    # The prompt with the first token, then five tokens a step.
    assert bench.runner.steps == [[21], *[[5]] * 8]


def test_an_end_cuts_off_what_was_right_behind_it():
    expected = answer(PROMPT, 20)
    cases = {
        "stop": ({"stop_token_ids": (expected[7],)}, expected[:8], FinishReason.STOP),
        "length": ({"max_tokens": 9}, expected[:9], FinishReason.LENGTH),
    }
    for name, (options, told, end) in cases.items():
        bench = EngineBench(drafts=knowing({name: expected}, max_draft=8))
        request = bench.submit(name, PROMPT, **{"max_tokens": 20} | options)
        bench.run()
        assert (bench.recorder.told[name], bench.recorder.ends[name]) == (told, end)
        # Whole pages of four of all but the last token, and nothing of what was guessed.
        tokens = request.tokens.copy()
        tokens[len(PROMPT) :] = expected[: len(tokens) - len(PROMPT)]
        cached = bench.engine.cached_len(tokens, request.cache_use.extra_key)
        assert cached == (len(PROMPT) + len(told) - 1) // 4 * 4
        bench.assert_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_of_wrong_guesses_are_free_after_the_step(page_size):
    expected = answer(PROMPT, 20)
    wrong = [(token + 1) % 200 for token in expected]
    bench = EngineBench(page_size=page_size, drafts=knowing({"r": wrong}, max_draft=8))
    request = bench.submit("r", PROMPT, max_tokens=20)
    while bench.engine.step() and request.stage is Stage.DECODING:
        kv = request.held_kv
        assert kv.committed_len == request.num_tokens - 1
        assert kv.allocated_len == -(-kv.committed_len // page_size) * page_size
    assert bench.recorder.told["r"] == expected
    assert [9] in bench.runner.steps


def test_nobody_waits_or_is_retracted_for_guesses():
    """Two answers for which the pool is too small: with wrong guesses all goes as without any."""
    prompts = {"a": PROMPT, "b": [*PROMPT, 50]}
    expected = {name: answer(prompt, 12) for name, prompt in prompts.items()}
    wrong = {name: [(token + 1) % 200 for token in told] for name, told in expected.items()}
    seen = []
    for drafts in (None, knowing(wrong)):
        scheduler = SchedulerConfig(output_reserve=0.0)
        bench = EngineBench(
            page_size=1, num_slots=48, rows=4, radix=False, scheduler=scheduler, drafts=drafts
        )
        for name, prompt in prompts.items():
            bench.submit(name, prompt, max_tokens=12)
        bench.run()
        assert bench.recorder.told == expected
        assert drafts is None or drafts.counters["draft_tokens"] > 10
        seen.append((bench.engine.steps, bench.engine.scheduler.counters))
    assert seen[0] == seen[1]
    assert seen[0][1]["retractions"] == 1


def test_a_step_with_drafts_is_no_larger_than_one_of_prompts():
    names = "abcd"
    expected = {name: answer([*PROMPT, at], 30) for at, name in enumerate(names)}
    scheduler = SchedulerConfig(chunk_tokens=6)
    bench = EngineBench(num_slots=512, scheduler=scheduler, drafts=knowing(expected))
    for at, name in enumerate(names):
        bench.submit(name, [*PROMPT, at], max_tokens=30)
    bench.run()
    assert bench.recorder.told == expected
    assert max(map(sum, bench.runner.steps)) == 6
    assert [3, 1, 1, 1] in bench.runner.steps


def test_an_answer_that_another_worker_began_goes_on_with_drafts():
    expected = answer(PROMPT, 30)
    bench = EngineBench(drafts=knowing({"r": expected}, random.Random(3)))
    request = bench.request("r", PROMPT, max_tokens=30)
    request.resume(0, expected[:11])
    bench.engine.submit(request)
    bench.run()
    assert bench.recorder.told["r"] == expected[11:]


def test_who_is_cancelled_amid_a_draft_gets_no_more():
    """By the listener of another one, between two tokens of one step."""
    expected = {name: answer([*PROMPT, at], 30) for at, name in enumerate("ab")}
    bench = EngineBench(drafts=knowing(expected))
    first, second = (
        bench.submit(name, [*PROMPT, at], max_tokens=30) for at, name in enumerate("ab")
    )
    tell = bench.recorder.tokens

    def tokens(request: Request, tokens: tuple[OutputToken, ...]) -> None:
        tell(request, tokens)
        if request is first and len(bench.recorder.told["a"]) == 4:
            bench.engine.end(second)

    bench.recorder.tokens = tokens
    bench.run()
    bench.assert_idle()
    assert bench.recorder.told["a"] == expected["a"]
    told = bench.recorder.told["b"]
    assert told == expected["b"][: len(told)]
    assert len(told) == 3


# --- constraints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallVocabulary]:
    vocabulary = SmallVocabulary(tmp_path_factory.mktemp("small"))
    yield vocabulary
    vocabulary.compiler.close()


@pytest.mark.parametrize("budget_s", [1.0, 0.0])
def test_constrained_answers_are_those_of_a_run_without_drafts(words, budget_s, monkeypatch):
    """Also where the time for masks of a step is over amid a draft."""
    texts = {"number": r"[0-9]{3}-[a-z]{9}", "open": r"[a-z]+", "short": "x"}
    cases: dict[str, dict[str, object]] = {}
    for name, text in texts.items():
        constraint = Constraint(ConstraintKind.REGEX, text)
        words.compiler.compile(constraint).result(timeout=10)
        cases[name] = DRAWN | {"constraint": constraint, "n": 2, "seed": len(name)}
    expected = _answer_all(EngineBench(num_slots=1024, rows=16, compiler=words.compiler), cases)
    monkeypatch.setattr("engine.constraint.CONSTRAINTS_STEP_CPU_S_MAX", budget_s or 1e-9)
    drafts = knowing(expected.told, random.Random(2))
    bench = EngineBench(num_slots=1024, rows=16, compiler=words.compiler, drafts=drafts)
    _assert_same(_answer_all(bench, cases), expected)
    assert expected.ends["number"] is FinishReason.STOP
    assert drafts.counters["draft_tokens_accepted"] > 0


def test_a_grammar_without_a_way_on_ends_all_samples_amid_their_drafts(words, monkeypatch):
    """The other sample was to have its next token chosen in the same round."""
    constraint = Constraint(ConstraintKind.REGEX, "[a-z]{20}")
    words.compiler.compile(constraint).result(timeout=10)
    options = DRAWN | {"constraint": constraint, "n": 2}
    expected = _answer_all(EngineBench(num_slots=512, compiler=words.compiler), {"r": options})
    drafts = knowing(expected.told)
    bench = EngineBench(num_slots=512, compiler=words.compiler, drafts=drafts)
    look = bench.engine.constraints.look

    def failing(request: Request) -> Outlook:
        if request.sample == 1 and len(request.output) == 4:
            raise InvalidInput("sampling.regex", "has no way on")
        return look(request)

    monkeypatch.setattr(bench.engine.constraints, "look", failing)
    first = bench.submit("r", [*PROMPT, 0], **options)
    # As the decode side of a worker does.
    monkeypatch.setattr(
        bench.recorder, "gave_up", lambda *_: [bench.engine.end(one) for one in first.samples]
    )
    bench.run()
    bench.assert_idle()
    assert bench.recorder.told == {name: told[:4] for name, told in expected.told.items()}
