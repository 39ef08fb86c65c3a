"""An answer that another worker began goes on as if one engine had given all of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.request import Stage
from kvferry.cache_key import CacheUse, Sharing
from kvferry.config import SchedulerConfig
from kvferry.errors import InvalidInput
from kvferry.generation import FinishReason, OutputToken, SampleProgress
from kvferry.ids import ExtraKey
from kvferry.sampling import Constraint, ConstraintKind, SamplingParams
from tests.support.digest_model import EOS, answer
from tests.support.engine_bench import EngineBench, Recorder, name_of
from tests.support.small_tokenizer import SmallVocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.request import Request

PROMPT = list(range(20, 41))
LENGTH = 11
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 3.0, "seed": 7},
    "nucleus": {"temperature": 2.0, "seed": 8, "top_p": 0.9, "top_k": 50, "min_p": 0.001},
    "penalties": {
        "temperature": 1.5,
        "seed": 3,
        "repetition_penalty": 1.7,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.5,
        "logit_bias": {5: 9.0, 6: 9.5, 8: 9.7},
    },
    "logprobs": {"temperature": 3.0, "seed": 9, "logprobs": 3},
    "min tokens": {
        "temperature": 3.0,
        "seed": 11,
        "min_tokens": 7,
        "stop_token_ids": tuple(range(0, 211, 2)),
    },
    "end of text": {"ignore_eos": False, "logit_bias": {EOS: 8.0}, "temperature": 2.0, "seed": 1},
}


class _FullRecorder(Recorder):
    """Remembers tokens with what was said of them."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, list[OutputToken]] = {}

    def tokens(self, request: Request, tokens: tuple[OutputToken, ...]) -> None:
        super().tokens(request, tokens)
        for sample, token in enumerate(tokens, request.sample):
            self.said.setdefault(name_of(request, sample), []).append(token)


def _bench(**options: Any) -> EngineBench:
    bench = EngineBench(**options)
    bench.recorder = _FullRecorder()
    return bench


def _undisturbed(**options: Any) -> tuple[list[OutputToken], FinishReason]:
    bench = _bench(auditing=False)
    bench.submit("r", PROMPT, **{"max_tokens": LENGTH} | options)
    bench.run()
    return bench.recorder.said["r"], bench.recorder.ends["r"]


def _receive(bench: EngineBench, request: Request) -> None:
    """Do what a handoff does between its reservation and its commit."""
    kv, known = request.held_kv, request.known[: request.inbound_len]
    slots = bench.kv_cache.slots(kv, kv.committed_len, len(known))
    bench.runner.receive(slots, known[kv.committed_len :], kv.committed_len)
    bench.kv_cache.commit(kv, len(known))
    bench.kv_cache.adopt(kv)


def _ids(tokens: Sequence[OutputToken]) -> list[int]:
    return [token.token_id for token in tokens]


def _submit(bench: EngineBench, told: Sequence[int], name: str = "r", **options: Any) -> Request:
    request = bench.request(name, PROMPT, **{"max_tokens": LENGTH} | options)
    request.resume(0, told)
    bench.engine.submit(request)
    return request


@pytest.mark.parametrize("kind", KINDS)
def test_cut_anywhere_the_rest_is_that_of_an_undisturbed_answer(kind: str) -> None:
    said, reason = _undisturbed(**KINDS[kind])
    assert len(said) >= 3
    for cut in range(len(said)):
        bench = _bench(page_size=4, auditing=False)
        _submit(bench, _ids(said[:cut]), **KINDS[kind])
        bench.run()
        assert bench.recorder.said["r"] == said[cut:], cut
        assert bench.recorder.ends == {"r": reason}
        bench.assert_idle()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallVocabulary]:
    vocabulary = SmallVocabulary(tmp_path_factory.mktemp("small"))
    yield vocabulary
    vocabulary.compiler.close()


@pytest.mark.parametrize("is_sent", [False, True], ids=["computed here", "kv is sent"])
def test_an_answer_goes_on_within_its_grammar(words: SmallVocabulary, is_sent: bool) -> None:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
    words.compiler.compile(constraint).result(timeout=60)
    options = {"temperature": 3.0, "seed": 5, "max_tokens": 60, "constraint": constraint}
    whole = _bench(compiler=words.compiler, auditing=False)
    whole.submit("r", PROMPT, **options)
    whole.run()
    said = whole.recorder.told["r"]
    assert json.loads(words.text(said)).keys() == {"name", "old"}
    for cut in range(1, len(said)):
        bench = _bench(compiler=words.compiler, auditing=False)
        request = bench.request("r", PROMPT, **options)
        request.resume(0, said[:cut])
        if is_sent:
            bench.engine.submit_inbound(request)
            assert bench.engine.next_expected() is request
            assert bench.engine.reserve_inbound(request)
            _receive(bench, request)
            bench.engine.adopt(request, [OutputToken(199)])
        else:
            bench.engine.submit(request)
        bench.run()
        assert bench.recorder.told["r"] == said[cut:]
        assert bench.recorder.ends == whole.recorder.ends
        bench.assert_idle()


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_kv_that_another_worker_sends_reaches_to_the_last_token_told(
    page_size: int, radix: bool
) -> None:
    said, _ = _undisturbed(**KINDS["penalties"])
    for cut in range(1, len(said)):
        bench = _bench(page_size=page_size, radix=radix)
        request = bench.request("r", PROMPT, max_tokens=LENGTH, **KINDS["penalties"])
        request.resume(0, _ids(said[:cut]))
        bench.engine.submit_inbound(request)
        assert bench.engine.next_expected() is request
        assert bench.engine.reserve_inbound(request)
        assert request.inbound_len == len(PROMPT) + cut - 1
        _receive(bench, request)
        # Whatever the source chose: the token is known.
        bench.engine.adopt(request, [OutputToken(199)])
        bench.run()
        assert bench.recorder.said["r"] == said[cut:]
        assert sum(map(sum, bench.runner.steps)) == len(said) - cut
        bench.assert_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_cached_of_the_known_tokens_is_used(page_size: int) -> None:
    said = answer(PROMPT, LENGTH)
    bench = _bench(page_size=page_size)
    # As if another conversation had gone on from the same answer.
    bench.submit("other", PROMPT + said[:8], max_tokens=1)
    bench.run()
    _submit(bench, said[:6])
    bench.run()
    known = len(PROMPT) + 6
    assert bench.recorder.hits["r"] == (known - 1) // page_size * page_size
    assert bench.recorder.told["r"] == said[6:]
    bench.assert_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_sent_kv_of_which_more_is_cached_than_is_sent(page_size: int) -> None:
    said = answer(PROMPT, LENGTH)
    bench = _bench(page_size=page_size)
    bench.submit("other", PROMPT + said[:8], max_tokens=1)
    bench.run()
    request = bench.request("r", PROMPT, max_tokens=LENGTH)
    request.resume(0, said[:6])
    bench.engine.submit_inbound(request)
    assert bench.engine.next_expected() is request
    assert bench.engine.reserve_inbound(request)
    assert request.held_kv.prefix_len == request.inbound_len // page_size * page_size
    _receive(bench, request)
    bench.engine.adopt(request, [OutputToken(199)])
    bench.run()
    assert bench.recorder.told["r"] == said[6:]
    bench.assert_idle()


@pytest.mark.parametrize("sharing", list(Sharing))
def test_each_way_to_share_kv(sharing: Sharing) -> None:
    said = answer(PROMPT, LENGTH)
    bench = _bench()
    request = bench.request("r", PROMPT, max_tokens=LENGTH)
    request.cache_use = CacheUse(ExtraKey(""), sharing)
    request.resume(0, said[:5])
    bench.engine.submit(request)
    bench.run()
    assert bench.recorder.told["r"] == said[5:]
    bench.assert_idle()


def test_under_a_sliding_window() -> None:
    single = EngineBench(window=6)
    single.submit("r", PROMPT, max_tokens=LENGTH)
    single.run()
    said = single.recorder.told["r"]
    for cut in range(1, LENGTH):
        bench = EngineBench(window=6)
        _submit(bench, said[:cut])
        bench.run()
        assert bench.recorder.told["r"] == said[cut:]
        bench.assert_idle()


def test_a_sample_resumes_with_its_own_seed_and_number() -> None:
    bench = EngineBench(num_slots=512)
    options = {"temperature": 3.0, "seed": 5, "max_tokens": LENGTH}
    bench.submit("r", PROMPT, n=4, **options)
    bench.run()
    whole = [bench.recorder.told[name] for name in ("r", "r/1", "r/2", "r/3")]
    for sample, said in enumerate(whole):
        again = EngineBench()
        request = again.request("r", PROMPT, n=4, **options)
        request.resume(sample, said[:4])
        again.engine.submit(request)
        again.run()
        assert list(again.recorder.told.values()) == [said[4:]]
        assert again.recorder.ends == {name_of(request): FinishReason.LENGTH}
        again.assert_idle()


def test_resumed_answers_under_pressure_are_retracted_once_at_most() -> None:
    prompts = {f"r{n}": list(range(20 + n, 29 + 5 * n)) for n in range(8)}
    bench = EngineBench(
        num_slots=120, rows=16, scheduler=SchedulerConfig(output_reserve=0.0), auditing=False
    )
    requests = []
    for number, (name, prompt) in enumerate(prompts.items()):
        request = bench.request(name, prompt, max_tokens=30)
        request.resume(0, answer(prompt, 3 * number))
        bench.engine.submit(request)
        requests.append(request)
    bench.run(5000)
    for number, (name, prompt) in enumerate(prompts.items()):
        assert bench.recorder.told[name] == answer(prompt, 30)[3 * number :]
    retractions = [request.retractions for request in requests]
    assert sum(retractions) > 0, "there was no pressure"
    assert max(retractions) == 1
    bench.assert_idle()


def test_what_could_never_fit_is_refused_however_little_is_left() -> None:
    bench = EngineBench(num_slots=64, context_length=64)
    request = bench.request("r", PROMPT, max_tokens=60)
    request.resume(0, [30] * 59)
    with pytest.raises(InvalidInput, match="max_tokens"):
        bench.engine.submit(request)


def test_a_resumed_answer_can_be_ended_in_any_stage() -> None:
    said = answer(PROMPT, LENGTH)
    for stage in (Stage.WAITING, Stage.PREFILLING, Stage.DECODING):
        bench = EngineBench(scheduler=SchedulerConfig(chunk_tokens=8))
        request = _submit(bench, said[:5])
        while request.stage is not stage:
            assert bench.engine.step()
        bench.engine.end(request)
        assert not bench.engine.step()
        bench.assert_idle()


def _progress(*counts: int, token: int = 3) -> list[SampleProgress]:
    return [SampleProgress((token,) * count) for count in counts]


@pytest.mark.parametrize(
    ("resumed", "problem"),
    [
        (_progress(1), "1 entries, for 2 samples"),
        (_progress(1, 1, 1), "3 entries, for 2 samples"),
        (2 * [SampleProgress((1,), True)], "no sample"),
        (_progress(2, 9), r"resumed\[1\]: has more than 8 tokens"),
        (_progress(1, 1, token=211), r"resumed\[0\]: has ids"),
        (_progress(1, 1, token=-1), r"resumed\[0\]: has ids"),
    ],
)
def test_progress_that_cannot_be_is_refused_by_name(
    resumed: list[SampleProgress], problem: str
) -> None:
    engine = EngineBench().engine
    with pytest.raises(InvalidInput, match=problem):
        engine.check_resumed(SamplingParams(n=2, max_tokens=8), resumed)


@pytest.mark.parametrize(
    "resumed", [[], _progress(8, 0), [*_progress(3), SampleProgress((), True)]]
)
def test_progress_that_can_be(resumed: list[SampleProgress]) -> None:
    EngineBench().engine.check_resumed(SamplingParams(n=2, max_tokens=8), resumed)


def test_known_tokens_are_copied() -> None:
    told = np.array([3, 4], dtype=np.int32)
    request = EngineBench().request("r", PROMPT)
    request.resume(0, told)
    told[:] = 9
    assert request.output.tolist() == [3, 4]
