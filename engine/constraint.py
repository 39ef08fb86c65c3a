"""Which tokens may come next in the answers that a grammar constrains.

The state of an answer is a function of its tokens: a matcher is made where an answer is first
looked at, and fed what it has not seen. So a retraction, a handoff, a fork and an answer that goes
on here need nothing of their own.

**Precedence.** Nothing outside the grammar is ever chosen. Within it, ends are not chosen before
`min_tokens`, nor with `ignore_eos`, as long as anything else is allowed. Where nothing is left but
the end, the answer ends. A stop id that the grammar allows ends the answer there, as any stop does.

**Cost to others.** A step computes masks for `CONSTRAINTS_STEP_CPU_S_MAX` of CPU; answers that are
left sit it out and come first in the next one. So do those whose grammar is still being compiled,
which happens beside the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from kvferry.clock import thread_cpu_s
from kvferry.errors import InternalError, InvalidInput
from kvferry.grammar import constraint_field
from kvferry.limits import CONSTRAINT_MASK_CPU_S_MAX, CONSTRAINTS_STEP_CPU_S_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from engine.request import Request
    from kvferry.errors import KvferryError
    from kvferry.grammar import Grammar, GrammarCompiler
    from kvferry.ids import TokenIds
    from kvferry.sampling import SamplingParams


class Outlook(Enum):
    """Whether an answer can have its next token chosen in this step."""

    OPEN = "open"
    """Yes; `Constraints.allowed` says from what."""
    LATER = "later"
    """Not in this step."""
    COMPLETE = "complete"
    """It has ended: the grammar allows no more."""


@dataclass(slots=True, eq=False)
class _Answer:
    """Where one answer stands in its grammar."""

    grammar: Grammar
    matcher: LLMatcher
    mask: NDArray[np.uint8]
    """What may come next: one bit per token, lowest first, in whole 64-bit words."""
    mask_address: int
    seen: int = 0
    """Tokens of the answer that the matcher was fed."""
    has_mask: bool = False
    """Whether `mask` is that after these."""


class Constraints:
    """The constrained answers of one engine. Only the engine thread calls it."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        cpu_s: Callable[[], float] = thread_cpu_s,
    ) -> None:
        """`compiler`: None where the model has no tokenizer; nothing can be constrained then."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._cpu_s = cpu_s
        self._answers: dict[Request, _Answer] = {}
        self._late: dict[Request, None] = {}
        self._spent_s = 0.0
        self.on_compiled: Callable[[], None] = _nothing
        """Called from another thread when a grammar has been compiled."""

    def prepare(self, params: SamplingParams) -> None:
        """Begin to compile the grammar of a request that will come. Raises `InvalidInput` if this
        worker cannot."""
        if params.constraint is None:
            return
        if self._compiler is None:
            problem = "cannot be enforced: this worker has no tokenizer"
            raise InvalidInput(constraint_field(params.constraint), problem)
        self._compiler.compile(params.constraint)

    def begin_step(self, requests: Iterable[Request]) -> list[Request]:
        """Start the budget of a step; those of `requests` that are constrained, in the order in
        which they are to be looked at."""
        self._spent_s = 0.0
        constrained = [request for request in requests if request.sampling.constraint is not None]
        if self._late:
            constrained.sort(key=lambda request: request not in self._late)
        return constrained

    def look(self, request: Request) -> Outlook:
        """Whether the next token of a constrained request can be chosen now.

        Raises `KvferryError` if it never can: what has been chosen is not of the grammar, or the
        grammar is refused, too complex, or cannot be gone on with.
        """
        if self._spent_s >= CONSTRAINTS_STEP_CPU_S_MAX:
            self._late[request] = None
            return Outlook.LATER
        answer = self._answers.get(request) or self._begin(request)
        if answer is None:
            return Outlook.LATER
        self._late.pop(request, None)
        started = self._cpu_s()
        outlook = self._advance(request, answer)
        spent_s = self._cpu_s() - started
        self._spent_s += spent_s
        if spent_s > CONSTRAINT_MASK_CPU_S_MAX:
            raise InvalidInput(
                answer.grammar.field, f"is too complex: a token took {spent_s:.2f} s"
            )
        return outlook

    def allowed(self, request: Request) -> NDArray[np.uint8] | None:
        """One bit per token of the vocabulary, lowest first, in whole 64-bit words; None: all.
        After `Outlook.OPEN`, and until the answer has grown."""
        if request.sampling.constraint is None:
            return None
        answer = self._answers[request]
        assert answer.has_mask, f"{request.id}: the step did not look at its constraint"
        return answer.mask

    def is_complete(self, request: Request) -> bool:
        """Whether the grammar allows no more than the answer has; False while nobody knows."""
        answer = self._answers.get(request)
        return answer is not None and self._feed(request, answer) and answer.matcher.is_stopped()

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._answers.pop(request, None)
        self._late.pop(request, None)

    def _begin(self, request: Request) -> _Answer | None:
        """None while the grammar is being compiled."""
        constraint = request.sampling.constraint
        assert constraint is not None, f"{request.id} is not constrained"
        assert self._compiler is not None, f"{request.id} was taken on"
        future: Future[Grammar] = self._compiler.compile(constraint)
        if not future.done():
            future.add_done_callback(lambda _: self.on_compiled())
            return None
        grammar = future.result()
        mask = np.zeros(8 * -(-self._vocab_size // 64), dtype=np.uint8)
        answer = _Answer(grammar, grammar.matcher(), mask, mask.ctypes.data)
        self._answers[request] = answer
        return answer

    def _advance(self, request: Request, answer: _Answer) -> Outlook:
        if not self._feed(request, answer):
            raise _refusal(answer, request.output)
        if answer.seen and answer.matcher.is_stopped() and not answer.matcher.is_error():
            return Outlook.COMPLETE
        if not answer.has_mask:
            self._find_mask(request, answer)
        return Outlook.OPEN

    def _feed(self, request: Request, answer: _Answer) -> bool:
        """Tell the matcher what it has not seen; False if the grammar does not allow that."""
        new = request.output[answer.seen :].tolist()
        if not new:
            return True
        answer.has_mask = False
        fed = answer.matcher.try_consume_tokens(new)
        answer.seen += fed
        return fed == len(new)

    def _find_mask(self, request: Request, answer: _Answer) -> None:
        mask = answer.mask
        # The library takes words of 32 bits; bits behind the vocabulary may be set.
        size = 4 * -(-self._vocab_size // 32)
        answer.matcher.unsafe_compute_mask_ptr(answer.mask_address, size)
        if self._vocab_size % 32:
            last = self._vocab_size // 8
            mask[last] &= (1 << self._vocab_size % 8) - 1
            mask[last + 1 :] = 0
        if answer.matcher.is_error() or not mask.any():
            problem = f"leaves no token after {answer.seen} of the answer, or is too complex there"
            raise InvalidInput(answer.grammar.field, problem)
        _leave_out(mask, self._unwanted(request))
        answer.has_mask = True

    def _unwanted(self, request: Request) -> tuple[int, ...]:
        return request.banned_ids + (self._eos_token_ids if request.sampling.ignore_eos else ())


def _refusal(answer: _Answer, output: TokenIds) -> KvferryError:
    """Why the matcher did not take the next token of `output`."""
    field, token = answer.grammar.field, int(output[answer.seen])
    again = answer.grammar.matcher()
    again.consume_tokens(output[: answer.seen].tolist())
    mask = np.frombuffer(again.compute_bitmask(), dtype=np.uint8)
    if mask[token // 8] >> token % 8 & 1:
        return InvalidInput(field, f"has no way on from token {answer.seen + 1} of the answer")
    return InternalError(f"{field}: token {token} of the answer is not of its language")


def _leave_out(mask: NDArray[np.uint8], ids: tuple[int, ...]) -> None:
    """Clear the bits of `ids`, unless no other bit is set."""
    allowed = [token for token in ids if mask[token // 8] >> token % 8 & 1]
    if not allowed:
        return
    rest = mask.copy()
    for token in allowed:
        rest[token // 8] &= 255 ^ (1 << token % 8)
    if rest.any():
        mask[:] = rest


def _nothing() -> None:
    """Nobody waits to be told."""
