"""Bugs of admission and retraction: who gets KV, and who has to give it back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SCHEDULER = "engine/scheduler.py"
_ADMISSION = "engine/admission.py"
_TESTS = ("tests/unit/engine/test_retraction.py",)

ENGINE_MUTANTS = (
    Mutant(
        "retract-the-oldest",
        "Under pressure the youngest gives its KV back.",
        _SCHEDULER,
        "        return ages[-1]\n",
        "        return ages[0]\n",
        _TESTS,
    ),
    Mutant(
        "retracted-goes-last",
        "A retracted request waits in its order of arrival.",
        _SCHEDULER,
        "bisect.insort(self._waiting, request, key=_arrival)",
        "self._waiting.append(request)",
        _TESTS,
    ),
    Mutant(
        "retracted-kv-dropped",
        "What a retracted request has computed stays as cache.",
        _ADMISSION,
        "self._kv_cache.release(kv, request.tokens[: kv.committed_len])",
        "self._kv_cache.release(kv, None)",
        _TESTS,
    ),
    Mutant(
        "retracted-twice",
        "Who was retracted comes back when its longest sequence is sure to fit.",
        _ADMISSION,
        "        if request.retractions:\n",
        "        if request.retractions > 1:\n",
        _TESTS,
    ),
    Mutant(
        "promises-not-kept",
        "Nobody is let in at the cost of what others are promised.",
        _ADMISSION,
        "            fits = wanted <= self.slack(admitted)\n",
        "            fits = wanted <= self.available\n",
        _TESTS,
    ),
    Mutant(
        "reserved-is-taken",
        "Slots for prompts that others wait for are given to nobody else.",
        _ADMISSION,
        "            for request in admitted\n            if request.prefill_only\n        )\n",
        "            for request in ()\n        )\n",
        _TESTS,
    ),
    Mutant(
        "limit-starves-prompts",
        "Whatever the limit of the gaps, prompts progress.",
        "engine/itl_limit.py",
        "        return max(tokens, min(PROMPT_TOKENS_MIN, most))\n",
        "        return max(tokens, 1)\n",
        ("tests/unit/engine/test_itl_limit.py",),
    ),
    Mutant(
        "limit-guesses-far",
        "What prompts cost is not extrapolated far beyond what was tried.",
        "engine/step_cost.py",
        "min(most, _GROWTH * self._most_tokens)",
        "most",
        ("tests/unit/engine/test_step_cost.py",),
    ),
)
