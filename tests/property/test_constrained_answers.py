"""Whatever the schema and whatever the model would say: the answer is valid."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.constraint import Constraints, Outlook
from engine.sampler import Sampler, SamplingRow
from kvferry.sampling import Constraint, ConstraintKind
from tests.support.digest_model import EOS, VOCAB
from tests.support.engine_bench import EngineBench
from tests.support.small_tokenizer import SmallVocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_TOKENS_MAX = 400

_NAMES = st.sampled_from(["a", "b", "key", "with space", "~", '"'])


def _object(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], required: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:required],
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(_NAMES, children, max_size=3), st.integers(0, 3))


def _array(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.builds(build, children, st.integers(0, 2), st.integers(0, 2))


_LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"x": [1, None]}}]),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-200, 200),
        st.integers(0, 500),
    ),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.lists(st.sampled_from(["x", "yes", 'q"', 7, -1, None]), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": ["null", "boolean"]}]),
)
SCHEMAS = st.recursive(
    _LEAVES,
    lambda children: st.one_of(
        _object(children),
        _array(children),
        st.lists(children, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallVocabulary]:
    vocabulary = SmallVocabulary(tmp_path_factory.mktemp("small"))
    yield vocabulary
    vocabulary.compiler.close()


@pytest.mark.property
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1), temperature=st.sampled_from([0.0, 1.0, 5.0]))
def test_answers_to_any_schema_are_valid(
    words: SmallVocabulary, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    words.compiler.compile(constraint).result(timeout=60)
    request = EngineBench().request(
        "r", [20], max_tokens=ANSWER_TOKENS_MAX, temperature=temperature, constraint=constraint
    )
    constraints = Constraints(words.compiler, VOCAB, (EOS,))
    generator = torch.Generator().manual_seed(seed)
    while request.finish_reason() is None:
        constraints.begin_step([request])
        if constraints.look(request) is Outlook.COMPLETE:
            break
        logits = torch.randn(1, VOCAB, generator=generator) * 4
        row = SamplingRow(
            request.sampling, request.known, request.prompt_len, (), constraints.allowed(request)
        )
        (chosen,) = Sampler().sample(logits, [row])
        request.append(chosen.token_id)
    text = words.text(request.output.tolist())
    assert constraints.is_complete(request), f"{schema} was not done with {text!r}"
    jsonschema.validate(json.loads(text), schema)
