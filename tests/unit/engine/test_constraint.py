"""Answers that a grammar constrains: over a model that would say anything."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from typing import TYPE_CHECKING

import jsonschema
import numpy as np
import pytest

from engine.constraint import Constraints, Outlook
from kvferry.config import SchedulerConfig
from kvferry.errors import InternalError, InvalidInput
from kvferry.generation import FinishReason, OutputToken
from kvferry.limits import CONSTRAINT_MASK_CPU_S_MAX, CONSTRAINTS_STEP_CPU_S_MAX
from kvferry.sampling import Constraint, ConstraintKind
from tests.support.digest_model import EOS, VOCAB
from tests.support.engine_bench import EngineBench
from tests.support.small_tokenizer import SmallVocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.grammar import Grammar

PROMPT = list(range(20, 41))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
        "old": {"type": "boolean"},
    },
    "required": ["name", "tags", "old"],
    "additionalProperties": False,
}
NUMBER = r"[0-9]{3}-[a-z]{2}"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallVocabulary]:
    vocabulary = SmallVocabulary(tmp_path_factory.mktemp("small"))
    yield vocabulary
    vocabulary.compiler.close()


def _regex(words: SmallVocabulary, text: str) -> Constraint:
    return _compiled(words, Constraint(ConstraintKind.REGEX, text))


def _schema(words: SmallVocabulary) -> Constraint:
    return _compiled(words, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)))


def _compiled(words: SmallVocabulary, constraint: Constraint) -> Constraint:
    """Nothing has to wait for it."""
    words.compiler.compile(constraint).result(timeout=60)
    return constraint


def _run(words: SmallVocabulary, constraint: Constraint, **options: object) -> tuple[str, object]:
    """Text and end of one drawn answer."""
    bench = EngineBench(compiler=words.compiler)
    options = {"temperature": 3.0, "max_tokens": 100} | options
    bench.submit("r", PROMPT, constraint=constraint, **options)
    bench.run()
    bench.assert_idle()
    return words.text(bench.recorder.told["r"]), bench.recorder.ends["r"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_answers_are_of_their_language(words: SmallVocabulary, seed: int, ignore_eos: bool) -> None:
    text, end = _run(words, _regex(words, NUMBER), seed=seed, ignore_eos=ignore_eos)
    assert re.fullmatch(NUMBER, text)
    assert end is FinishReason.STOP
    text, end = _run(words, _schema(words), seed=seed, ignore_eos=ignore_eos)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert end is FinishReason.STOP


def test_a_greedy_answer_follows_a_grammar(words: SmallVocabulary) -> None:
    grammar = 'start: "yes" sign | "no" sign\nsign: "!" | "?"'
    constraint = _compiled(words, Constraint(ConstraintKind.GRAMMAR, grammar))
    text, end = _run(words, constraint, temperature=0.0)
    assert text in {"yes!", "yes?", "no!", "no?"}
    assert end is FinishReason.STOP


def test_an_answer_that_is_complete_at_its_longest_has_stopped(words: SmallVocabulary) -> None:
    assert _run(words, _regex(words, "!|[?]"), max_tokens=1)[1] is FinishReason.STOP
    assert _run(words, _regex(words, "[!?]{2}"), max_tokens=1)[1] is FinishReason.LENGTH


def test_ends_are_put_off_only_while_anything_else_is_allowed(words: SmallVocabulary) -> None:
    either = _regex(words, "a{0,4}")
    for seed in range(8):
        # `ab` and `abc` are no beginnings, so every token is one letter.
        text, end = _run(words, either, seed=seed, ignore_eos=False, min_tokens=3)
        assert (len(text) in (3, 4), end) == (True, FinishReason.STOP)
        text, end = _run(words, either, seed=seed, ignore_eos=True)
        assert (text, end) == ("aaaa", FinishReason.STOP)
        # The grammar ends before min_tokens.
        text, end = _run(words, either, seed=seed, ignore_eos=False, min_tokens=9)
        assert (text, end) == ("aaaa", FinishReason.STOP)


def test_nothing_may_be_the_answer(words: SmallVocabulary) -> None:
    for options in ({"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 2}):
        assert _run(words, _regex(words, "(a{0})"), **options) == ("", FinishReason.STOP)


def test_a_stop_id_ends_an_answer_but_a_ban_does_not_trap_it(words: SmallVocabulary) -> None:
    (bang,) = words.ids("!")
    assert _run(words, _regex(words, "!!!"), stop_token_ids=(bang,)) == ("!", FinishReason.STOP)
    banned = {"stop_token_ids": (bang,), "min_tokens": 2}
    assert _run(words, _regex(words, "!!!"), **banned) == ("!", FinishReason.STOP)
    assert _run(words, _regex(words, "!?[?]"), **banned)[0] == "?"


def test_bias_and_penalties_cannot_leave_the_language(words: SmallVocabulary) -> None:
    (one,) = words.ids("1")
    odd = {"logit_bias": {one: -100.0, EOS: 100.0}, "repetition_penalty": 50.0}
    text, _ = _run(words, _regex(words, "1{6}"), **odd, top_k=1, min_p=0.9, top_p=0.1)
    assert text == "111111"


def test_logprobs_are_the_models_own(words: SmallVocabulary) -> None:
    bench = EngineBench(compiler=words.compiler)
    told: list[OutputToken] = []
    bench.recorder.tokens = lambda request, tokens: told.extend(tokens)
    bench.submit("r", PROMPT, constraint=_regex(words, NUMBER), logprobs=2, max_tokens=1)
    bench.run()
    # The model's favourite has logit 10, all others 0.
    favourite = 10 - np.log(np.exp(10) + VOCAB - 1)
    assert told[0].logprobs.top[0][1] == pytest.approx(favourite, abs=1e-5)
    assert told[0].logprobs.logprob == pytest.approx(favourite - 10, abs=1e-5)


def test_samples_part_and_each_is_what_it_is_alone(words: SmallVocabulary) -> None:
    constraint = _schema(words)
    bench = EngineBench(compiler=words.compiler, num_slots=1024)
    params = {"temperature": 3.0, "max_tokens": 100, "constraint": constraint, "seed": 5}
    request = bench.submit("r", PROMPT, n=3, **params)
    bench.run()
    texts = [words.text(bench.recorder.told[name]) for name in ("r", "r/1", "r/2")]
    for sample, text in enumerate(texts):
        jsonschema.validate(json.loads(text), SCHEMA)
        seed = request.sampling.of_sample(sample).seed
        assert _run(words, constraint, seed=seed)[0] == text
    assert len(set(texts)) > 1


def test_retraction_and_going_on_elsewhere_change_nothing(words: SmallVocabulary) -> None:
    constraint = _schema(words)
    params = {"temperature": 3.0, "max_tokens": 100, "constraint": constraint}
    alone = [_run(words, constraint, seed=seed)[0] for seed in range(6)]
    bench = EngineBench(
        compiler=words.compiler, num_slots=160, scheduler=SchedulerConfig(output_reserve=0.0)
    )
    for seed in range(6):
        bench.submit(f"r{seed}", PROMPT, seed=seed, **params)
    bench.run()
    assert bench.engine.scheduler.counters["retractions"] > 0
    told = [bench.recorder.told[f"r{seed}"] for seed in range(6)]
    assert [words.text(tokens) for tokens in told] == alone
    other = EngineBench(compiler=words.compiler)
    for at in range(1, len(told[0]), 6):
        request = other.request(f"at{at}", PROMPT, seed=0, **params)
        request.resume(0, told[0][:at])
        other.engine.submit(request)
        other.run()
        assert told[0][:at] + other.recorder.told[f"at{at}"] == told[0]


def test_a_handoff_goes_on_with_the_sources_token(words: SmallVocabulary) -> None:
    constraint = _regex(words, NUMBER)
    source, sink = (EngineBench(compiler=words.compiler) for _ in range(2))
    params = {"temperature": 3.0, "seed": 2, "constraint": constraint}
    held = source.submit("r", PROMPT, prefill_only=True, **params)
    source.run()
    first = source.recorder.told["r"]
    source.engine.end(held)
    request = sink.reserve("r", PROMPT, **params)
    slots = sink.kv_cache.slots(request.held_kv, 0, request.prompt_len)
    sink.runner.receive(slots, request.prompt, 0)
    sink.kv_cache.commit(request.held_kv, request.prompt_len)
    sink.kv_cache.adopt(request.held_kv)
    sink.engine.adopt(request, [OutputToken(first[0])])
    sink.run()
    assert words.text(first + sink.recorder.told["r"]) == _run(words, constraint, seed=2)[0]


def test_a_token_that_is_not_of_the_language_ends_the_answer(words: SmallVocabulary) -> None:
    bench = EngineBench(compiler=words.compiler)
    request = bench.request("r", PROMPT, constraint=_regex(words, NUMBER))
    request.resume(0, words.ids("1x"))
    bench.engine.submit(request)
    bench.run()
    assert isinstance(bench.recorder.ends["r"], InternalError)
    bench.assert_idle()


def test_a_dead_end_is_told_and_harms_nobody_else(words: SmallVocabulary) -> None:
    grammar = 'start: "a" "b" never\nnever: "c" never'
    constraint = _compiled(words, Constraint(ConstraintKind.GRAMMAR, grammar))
    bench = EngineBench(compiler=words.compiler)
    bench.submit("trapped", PROMPT, constraint=constraint, n=2)
    bench.submit("free", PROMPT, max_tokens=30)
    bench.run(600)
    ends = bench.recorder.ends
    assert isinstance(ends["trapped"], InvalidInput), ends["trapped"]
    assert ends["free"] is FinishReason.LENGTH
    bench.assert_idle()


def test_a_worker_without_a_tokenizer_refuses(words: SmallVocabulary) -> None:
    bench = EngineBench()
    request = bench.request("r", PROMPT, constraint=_regex(words, "a"))
    with pytest.raises(InvalidInput, match=r"^sampling\.regex: .*no tokenizer"):
        bench.engine.check_input(request.prompt, request.sampling)


# --- cost to others -------------------------------------------------------------------------


class _SlowCompiler:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.future: Future[Grammar] = Future()

    def compile(self, constraint: Constraint) -> Future[Grammar]:
        del constraint
        return self.future


def test_a_request_waits_for_its_grammar_and_others_go_on(words: SmallVocabulary) -> None:
    constraint = _regex(words, NUMBER)
    compiler, woken = _SlowCompiler(), []
    bench = EngineBench(compiler=compiler)
    bench.engine.constraints.on_compiled = lambda: woken.append(True)
    bench.submit("waits", PROMPT, constraint=constraint)
    bench.submit("free", PROMPT, max_tokens=4)
    bench.run()
    assert bench.recorder.ends == {"free": FinishReason.LENGTH}
    assert "waits" not in bench.recorder.told
    compiler.future.set_result(words.compiler.compile(constraint).result())
    assert woken
    bench.run()
    assert re.fullmatch(NUMBER, words.text(bench.recorder.told["waits"]))


def test_a_refused_grammar_ends_its_request_alone() -> None:
    compiler = _SlowCompiler()
    compiler.future.set_exception(InvalidInput("sampling.regex", "is bad"))
    bench = EngineBench(compiler=compiler)
    bench.submit("bad", PROMPT, constraint=Constraint(ConstraintKind.REGEX, "x"))
    bench.run()
    assert str(bench.recorder.ends["bad"]) == "sampling.regex: is bad"
    bench.assert_idle()


class _Meter:
    """CPU time that passes with every look."""

    def __init__(self, *costs: float) -> None:
        self._costs = list(costs)
        self._now, self._calls = 0.0, 0

    def __call__(self) -> float:
        self._calls += 1
        if self._calls % 2 == 0:
            self._now += self._costs[0] if len(self._costs) == 1 else self._costs.pop(0)
        return self._now


def test_what_a_step_has_no_time_for_comes_first_in_the_next(words: SmallVocabulary) -> None:
    bench = EngineBench(compiler=words.compiler)
    third = CONSTRAINTS_STEP_CPU_S_MAX / 2.5
    constraints = Constraints(words.compiler, VOCAB, (EOS,), _Meter(third))
    constraint = _regex(words, NUMBER)
    requests = [bench.request(f"r{n}", PROMPT, constraint=constraint) for n in range(5)]
    turns = []
    for _ in range(2):
        order = constraints.begin_step(requests)
        outlooks = {r.id.request_id: constraints.look(r) for r in order}
        turns.append({name for name, outlook in outlooks.items() if outlook is Outlook.OPEN})
    assert turns == [{"r0", "r1", "r2"}, {"r3", "r4", "r0"}]


def test_an_answer_that_costs_too_much_is_given_up(words: SmallVocabulary) -> None:
    bench = EngineBench(compiler=words.compiler)
    constraints = Constraints(words.compiler, VOCAB, (EOS,), _Meter(2 * CONSTRAINT_MASK_CPU_S_MAX))
    request = bench.request("r", PROMPT, constraint=_regex(words, NUMBER))
    constraints.begin_step([request])
    with pytest.raises(InvalidInput, match=r"^sampling\.regex: is too complex"):
        constraints.look(request)
