"""How far an attempt came at a worker, and when: what a router makes a request's timeline of.

Clocks of two processes are not compared. A worker tells seconds since it took the attempt, a source
seconds since it was asked for a prompt; each by its own clock. What was not reached is None.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptMarks:
    """Of the worker that computes a prompt for another one, in seconds since it was asked."""

    scheduled_s: float
    """It has row and slots; computing begins."""
    computed_s: float
    """Its first tokens are chosen."""
    granted_s: float
    """The other worker has room for its KV; sending begins."""
    completed_s: float
    """Everything is with the link."""


@dataclass(frozen=True, slots=True)
class AttemptMarks:
    """Of the worker that decodes, in seconds since it took the attempt."""

    fetched_s: float | None = None
    """It expects to have room, and asks the source for the prompt's KV."""
    ready_s: float | None = None
    """The source has begun to compute it."""
    granted_s: float | None = None
    """Slots are reserved; sending may begin."""
    admitted_s: float | None = None
    """Without a source: the prompt has row and slots, and is computed here."""
    first_token_s: float | None = None
    """The first token of the attempt is known."""
    adopted_s: float | None = None
    """All KV from the source is here; decoding begins."""
    ended_s: float | None = None
    """The attempt has ended, whether well or not."""
    source: PromptMarks | None = None
    """What the source told of itself, once everything was sent."""
