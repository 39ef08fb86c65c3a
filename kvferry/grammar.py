"""What an answer may be: the text of a constraint, compiled against a model's vocabulary.

Routers and workers compile alike, with the same library, limits and vocabulary, so that a worker
can serve what a router has let through. The library bounds most of what a text can cost, not all of
it: what clients send is first compiled in a process that may die of it (`router.constraint_gate`).
Loads no torch.

Order of the checks: size and characters of the text, what the notation itself can be asked without
the library, then the library, then whether there is any first token, and in what time.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.clock import thread_cpu_s
from kvferry.errors import InternalError, InvalidInput, KvferryError
from kvferry.limits import (
    CONSTRAINT_CHARACTERS_MAX,
    CONSTRAINT_FIRST_MASK_CPU_S_MAX,
    GRAMMARS_KEPT_MAX,
)
from kvferry.sampling import Constraint, ConstraintKind

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance._lib import JsonCompileOptions

_STACK_BYTES = 256 * 2**20
"""Of the thread that compiles; the library recurses along chains of `$ref` and of rules. 8 MiB are
used up by some 1,500 links; a text of the greatest length has at most 11,000. Only what is touched
takes memory."""

_LIMITS = LLParserLimits(
    # Building the lexer, some 50,000 a millisecond: a schema of 300 objects with dates and ranges
    # needs 150,000.
    initial_lexer_fuel=300_000,
    # One mask: 14,000 and 20,000 a millisecond.
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    # One or two kilobytes each.
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    # Messages go to clients and logs: nothing of what others asked for.
    verbose_errors=False,
)

_JSON_OPTIONS: JsonCompileOptions = {
    # A free choice of blanks lets a model fill its answer with them; as `json.dumps` writes.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # An answer must be valid: what cannot be enforced is refused.
    "lenient": False,
    "coerce_one_of": False,
}

_PROBLEM_CHARACTERS_MAX = 300

_thread_start = threading.Lock()


class Grammar:
    """A compiled constraint."""

    def __init__(self, prototype: LLMatcher, field: str) -> None:
        self._prototype = prototype
        self.field = field
        """The name by which a client knows it."""

    def matcher(self) -> LLMatcher:
        """A fresh one, at the beginning of an answer. By one thread at a time."""
        return self._prototype.deep_copy()


class GrammarCompiler:
    """Compiles constraints in a thread of its own, and remembers those asked for last."""

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        kept_max: int = GRAMMARS_KEPT_MAX,
    ) -> None:
        """`directory` is the model's; its `tokenizer.json` is read by the first compilation."""
        self._kept_max = kept_max
        self._file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._known: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> Future[Grammar]:
        """The grammar, now or later; or the `InvalidInput` that refuses it. From any thread."""
        with self._lock:
            future = self._known.get(constraint)
            if future is None:
                if self._executor is None:
                    self._executor = _start_executor()
                future = self._executor.submit(self._compile, constraint)
                self._known[constraint] = future
                if len(self._known) > self._kept_max:
                    self._known.popitem(last=False)
            self._known.move_to_end(constraint)
        return future

    def close(self) -> None:
        """Compile nothing more; what waits is cancelled."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint) -> Grammar:
        field = constraint_field(constraint)
        try:
            check_text(constraint)
            tokenizer, source = self._require_tokenizer(field), _source(constraint)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise InvalidInput(field, _problem(matcher.get_error()))
            _check_beginning(matcher.deep_copy(), field)
        except KvferryError:
            raise
        except BaseException as error:  # outermost frame of the thread; panics are no Exception
            raise InternalError(f"compiling {field} failed: {error!r}") from error
        return Grammar(matcher, field)

    def _require_tokenizer(self, field: str) -> LLTokenizer:
        if self._tokenizer is None:
            if not self._file.is_file():
                raise InvalidInput(field, "cannot be enforced: this model has no tokenizer.json")
            eos = list(self._eos_token_ids) or None
            try:
                self._tokenizer = LLTokenizer(
                    str(self._file), n_vocab=self._vocab_size, eos_token=eos
                )
            except ValueError as error:
                problem = f"cannot be enforced with this model's tokenizer: {error}"
                raise InvalidInput(field, problem[:_PROBLEM_CHARACTERS_MAX]) from error
        return self._tokenizer


def constraint_field(constraint: Constraint) -> str:
    """The name by which a client knows it."""
    return f"sampling.{constraint.kind.value}"


def check_text(constraint: Constraint) -> None:
    """What needs no compilation. Raises `InvalidInput`."""
    field, text = constraint_field(constraint), constraint.text
    if not text:
        raise InvalidInput(field, "must not be empty")
    if len(text) > CONSTRAINT_CHARACTERS_MAX:
        problem = f"has {len(text)} characters; at most {CONSTRAINT_CHARACTERS_MAX}"
        raise InvalidInput(field, problem)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(field, f"is no Unicode text: {error.reason}") from error
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        _check_schema(field, text)
    elif constraint.kind is ConstraintKind.GRAMMAR and text.lstrip().startswith("{"):
        # The library would take it for its own JSON notation, to which other limits apply.
        raise InvalidInput(field, "is not in Lark notation")


def _check_schema(field: str, text: str) -> None:
    try:
        schema: Any = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidInput(field, "must be a JSON object")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _source(constraint: Constraint) -> str:
    """The constraint in the library's own notation. Raises `InvalidInput`."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(constraint.text, overrides=_JSON_OPTIONS)
            except ValueError as error:
                raise InvalidInput(constraint_field(constraint), str(error)) from error
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.text)


def _check_beginning(matcher: LLMatcher, field: str) -> None:
    """Refuse what no answer can begin with, and what takes long to say so."""
    started = thread_cpu_s()
    allowed = any(matcher.compute_bitmask())
    if matcher.is_error() or not allowed:
        raise InvalidInput(field, "no answer satisfies it, or it is too complex")
    if thread_cpu_s() - started > CONSTRAINT_FIRST_MASK_CPU_S_MAX:
        raise InvalidInput(field, "is too complex: its first token takes too long")


def _problem(message: str) -> str:
    """The line of the library's message that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if any("coerce_one_of" in line for line in lines):
        return "oneOf is supported where no two alternatives have a value in common; use anyOf"
    told = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return told.removeprefix("error:").strip()[:_PROBLEM_CHARACTERS_MAX] or "is not valid"


def _start_executor() -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1, "grammars")
    with _thread_start:
        before = threading.stack_size(_STACK_BYTES)
        try:
            executor.submit(int).result()
        finally:
            threading.stack_size(before)
    return executor
