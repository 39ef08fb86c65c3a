"""Bugs of several samples of one prompt: their seeds, their room, their ends."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ADMISSION = "engine/admission.py"
_ENGINE = "engine/engine.py"
_TESTS = ("tests/unit/engine/test_samples.py",)

SAMPLE_MUTANTS = (
    Mutant(
        "samples-share-a-seed",
        "Each sample draws with a seed of its own.",
        "kvferry/sampling.py",
        "seed=(self.seed + index * _SEED_STEP) % 2**64",
        "seed=self.seed",
        _TESTS,
    ),
    Mutant(
        "room-for-one-sample",
        "A prompt comes in when all its samples fit.",
        _ADMISSION,
        "        if request.forks_due == 0:\n            return one\n",
        "        if request.forks_due >= 0:\n            return one\n",
        _TESTS,
    ),
    Mutant(
        "row-for-one-sample",
        "Rows are kept for the samples of admitted prompts.",
        _ADMISSION,
        "num_free - sum(request.forks_due for request in admitted)",
        "num_free",
        _TESTS,
    ),
    Mutant(
        "one-sample-assured",
        "A retracted prompt comes back with all its samples assured.",
        _ADMISSION,
        "max(self.horizon, request.last_arrival)",
        "max(self.horizon, request.arrival)",
        _TESTS,
    ),
    Mutant(
        "shared-pages-counted-for-all",
        "Pages that samples share are promised once.",
        _ADMISSION,
        "all_of_them = one + request.forks_due * (one - self._shared_len(request))",
        "all_of_them = one + request.forks_due * one",
        _TESTS,
    ),
    Mutant(
        "first-tokens-of-others",
        "A source's first tokens are those of the samples asked for.",
        _ENGINE,
        "if len(firsts) != request.firsts_due:",
        "if len(firsts) == 0:",
        ("tests/unit/decode_worker/test_intake.py",),
    ),
    Mutant(
        "attempt-ends-with-its-first-sample",
        "An attempt ends when all its samples have.",
        "decode_worker/attempt_exchange.py",
        "            if attempt.samples_left == 0:\n",
        "            if item.finish is not None:\n",
        ("tests/unit/decode_worker/test_attempt_exchange.py",),
    ),
    Mutant(
        "cancel-leaves-siblings",
        "Whoever cancels ends all samples.",
        "decode_worker/intake.py",
        "for request in entry.requests:\n            if request.stage",
        "for request in (entry.request,):\n            if request.stage",
        ("tests/unit/decode_worker/test_intake.py",),
    ),
)
