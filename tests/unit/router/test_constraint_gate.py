"""What clients may constrain answers to, and what becomes of a text that harms who compiles it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvferry.clock import MonotonicClock
from kvferry.errors import InvalidInput, Overloaded, WorkerUnavailable
from kvferry.limits import CONSTRAINT_CHARACTERS_MAX
from kvferry.sampling import Constraint, ConstraintKind
from router.constraint_gate import ConstraintGate
from router.request import ServiceClass
from tests.support.digest_model import EOS, VOCAB
from tests.support.small_tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA, REGEX, GRAMMAR = ConstraintKind
WEIGHTS = dict.fromkeys(ServiceClass, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return directory


def _verdicts(model: Path, *constraints: tuple[ConstraintKind, str]) -> list[str]:
    """`ok`, or the refusal, of each; asked one after the other."""

    async def ask() -> list[str]:
        gate = _gate(model)
        try:
            return [await _verdict(gate, Constraint(kind, text)) for kind, text in constraints]
        finally:
            await gate.stop()

    return asyncio.run(ask())


def _gate(model: Path, **options: float) -> ConstraintGate:
    return ConstraintGate(model, VOCAB, (EOS,), WEIGHTS, MonotonicClock(), **options)


async def _verdict(gate: ConstraintGate, constraint: Constraint) -> str:
    try:
        await _check(gate, constraint)
    except InvalidInput as error:
        return str(error)
    return "ok"


async def _check(gate: ConstraintGate, constraint: Constraint, tenant: str = "") -> None:
    await gate.check(constraint, ServiceClass.STANDARD, tenant)


def _chain(links: int) -> str:
    defs: dict[str, object] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(links)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": defs | {f"d{links}": {"type": "null"}}})


def _assert_all(told: Sequence[str], expected: Sequence[str]) -> None:
    for verdict, beginning in zip(told, expected, strict=True):
        assert verdict.startswith(beginning), told


def test_bad_texts_are_refused_by_name(model: Path) -> None:
    cases = [
        (REGEX, "[0-9]+", "ok"),
        (REGEX, "", "sampling.regex: must not be empty"),
        (REGEX, "(a", "sampling.regex: unclosed group"),
        (REGEX, "(?=a)b", "sampling.regex: look-around"),
        (REGEX, r"(a)\1", "sampling.regex: backreferences are not supported"),
        (REGEX, r"[^\s\S]", "sampling.regex: no answer satisfies it"),
        (REGEX, "\ud800", "sampling.regex: is no Unicode text"),
        (REGEX, "a\0b|c", "ok"),
        (REGEX, "a" * (CONSTRAINT_CHARACTERS_MAX + 1), "sampling.regex: has 65537 characters"),
        (REGEX, "(" * 30_000 + ")" * 30_000, "sampling.regex: "),
        (SCHEMA, '{"type": "object"}', "ok"),
        (SCHEMA, "{", "sampling.json_schema: is not valid JSON"),
        (SCHEMA, "[1]", "sampling.json_schema: must be a JSON object"),
        (SCHEMA, '{"const": NaN}', "sampling.json_schema: is not valid JSON"),
        (SCHEMA, '{"const": "\\ud800"}', "sampling.json_schema: "),
        (SCHEMA, "[" * 60_000, "sampling.json_schema: is not valid JSON"),
        (SCHEMA, '{"type": "strin"}', "sampling.json_schema: Invalid type: strin"),
        (SCHEMA, '{"not": {}}', 'sampling.json_schema: Unimplemented keys: ["not"]'),
        (SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', "sampling.json_schema: Unimpl"),
        (SCHEMA, '{"$ref": "#"}', "sampling.json_schema: no answer satisfies it"),
        (SCHEMA, '{"$ref": "http://example.com/a"}', "sampling.json_schema: Resource"),
        (SCHEMA, '{"oneOf": [{"type": "null"}, {}]}', "sampling.json_schema: oneOf"),
        (GRAMMAR, 'start: "a" | start "b"', "ok"),
        (GRAMMAR, 'start "a"', "sampling.grammar: 1(7): Expected"),
        (GRAMMAR, "start: start", "sampling.grammar: no answer satisfies it"),
        (GRAMMAR, 'start: "a" nowhere', "sampling.grammar: at 1(8): unknown name"),
        (GRAMMAR, '{"grammars": []}', "sampling.grammar: is not in Lark notation"),
    ]  # fmt: skip
    told = _verdicts(model, *((kind, text) for kind, text, _ in cases))
    _assert_all(told, [expected for *_, expected in cases])


def test_texts_that_need_a_deep_stack_pass(model: Path) -> None:
    links = 4600
    rules = "\n".join(f"a{n}:a{n + 1}" for n in range(links))
    grammar = f'start:a0\n{rules}\na{links}:"z"'
    assert len(grammar) < CONSTRAINT_CHARACTERS_MAX
    _assert_all(_verdicts(model, (SCHEMA, _chain(1800)), (GRAMMAR, grammar)), ["ok", "ok"])


def test_a_text_that_ends_who_compiles_it_is_refused_and_harms_no_other(model: Path) -> None:
    patterns = [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(40)]
    explodes = json.dumps({"type": "string", "allOf": patterns})
    _assert_all(
        _verdicts(model, (SCHEMA, explodes), (REGEX, "[ab]"), (SCHEMA, explodes)),
        ["sampling.json_schema: is too complex", "ok", "sampling.json_schema: is too complex"],
    )


def test_a_client_that_leaves_takes_nothing_from_others(model: Path) -> None:
    async def run() -> None:
        gate = _gate(model)
        leaver = asyncio.create_task(_check(gate, Constraint(REGEX, "a+")))
        other = asyncio.create_task(_verdict(gate, Constraint(REGEX, "(")))
        await asyncio.sleep(0)
        leaver.cancel()
        assert (await other).startswith("sampling.regex: unclosed")
        await _check(gate, Constraint(REGEX, "a+"))
        await gate.stop()

    asyncio.run(run())


class _SlowGate(ConstraintGate):
    """Compiles nothing; each constraint takes until `go_on`."""

    def __init__(self) -> None:
        super().__init__(Path(), VOCAB, (EOS,), WEIGHTS, MonotonicClock())
        self.asked: list[str] = []
        self.go_on = asyncio.Event()

    async def _ask(self, constraint: Constraint) -> str | None:
        self.asked.append(constraint.text)
        await self.go_on.wait()
        return None

    def asks(self, text: str, tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(_check(self, Constraint(REGEX, text), tenant))


def test_a_tenant_with_many_does_not_keep_another_waiting() -> None:
    async def run() -> None:
        gate = _SlowGate()
        tasks = [gate.asks(f"many{number}", "many") for number in range(8)]
        await asyncio.sleep(0)
        tasks += [gate.asks(f"few{number}", "few") for number in range(2)]
        await asyncio.sleep(0)
        gate.go_on.set()
        await asyncio.gather(*tasks)
        assert gate.asked[0] == "many0"
        assert max(map(gate.asked.index, ("few0", "few1"))) <= 3
        await gate.stop()

    asyncio.run(run())


def test_what_nobody_waits_for_is_not_compiled() -> None:
    async def run() -> None:
        gate = _SlowGate()
        compiled, left, again = (
            gate.asks("compiled", "a"),
            gate.asks("left", "a"),
            gate.asks("again", "a"),
        )
        other = gate.asks("again", "b")
        await asyncio.sleep(0)
        for task in (compiled, left, again):
            task.cancel()
        await asyncio.sleep(0)
        gate.go_on.set()
        await other
        await gate.asks("last", "b")
        assert gate.asked == ["compiled", "again", "last"]
        await gate.asks("left", "a")
        assert gate.asked[-1] == "left"
        await gate.stop()

    asyncio.run(run())


def test_nobody_waits_for_ever(model: Path) -> None:
    async def run() -> None:
        gate = _gate(model, timeout_s=0.0)
        with pytest.raises(Overloaded):
            await _check(gate, Constraint(REGEX, "a+"))
        await gate.stop()

    asyncio.run(run())


def test_a_stopped_gate_refuses(model: Path) -> None:
    async def run() -> None:
        gate = _gate(model)
        waiting = asyncio.create_task(_check(gate, Constraint(REGEX, "a+")))
        await asyncio.sleep(0.01)
        await gate.stop()
        with pytest.raises((WorkerUnavailable, InvalidInput, Overloaded)):
            await waiting
        with pytest.raises(WorkerUnavailable):
            await _check(gate, Constraint(REGEX, "b+"))

    asyncio.run(run())


def test_a_model_without_a_usable_tokenizer_refuses_all(tmp_path: Path) -> None:
    expected = "sampling.regex: cannot be enforced: this model has no tokenizer.json"
    _assert_all(_verdicts(tmp_path, (REGEX, "a+")), [expected])
    (tmp_path / "tokenizer.json").write_text("{}")
    expected = "sampling.regex: cannot be enforced with this model's tokenizer"
    _assert_all(_verdicts(tmp_path, (REGEX, "a+")), [expected])
