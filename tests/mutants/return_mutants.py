"""Bugs of KV return: what goes back is never in the way, and never what it is not."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SCHEDULER = "engine/scheduler.py"
_HOLDING = ("tests/unit/engine/test_holding.py",)
_ENDS = "tests/integration/test_return_ends.py::"

RETURN_MUTANTS = (
    Mutant(
        "holding-outlives-a-retraction",
        "What goes back is given up before a running request.",
        _SCHEDULER,
        "            if self._give_way():\n                continue\n            victim",
        "            victim",
        _HOLDING,
    ),
    Mutant(
        "holding-in-the-way-of-a-request",
        "Nobody waits for room that only holds what goes back.",
        _SCHEDULER,
        "        while not self._admission.try_open(request, self._admitted(), expected):\n"
        "            if not self._give_way():\n                return False\n        return True\n",
        "        return self._admission.try_open(request, self._admitted(), expected)\n",
        (*_HOLDING, "tests/unit/prefill_worker/test_return_sink.py"),
    ),
    Mutant(
        "holding-in-the-way-of-a-handoff",
        "Nobody's handoff waits for room that only holds what goes back.",
        _SCHEDULER,
        "            if not self._give_way():\n                return None\n",
        "            return None\n",
        _HOLDING,
    ),
    Mutant(
        "holding-takes-a-place",
        "What goes back takes nobody's place in the batch.",
        _SCHEDULER,
        "if r.stage is Stage.INBOUND and r.give_way is None]",
        "if r.stage is Stage.INBOUND]",
        _HOLDING,
    ),
    Mutant(
        "holding-takes-what-is-kept",
        "What goes back takes no room that is kept for a handoff.",
        _SCHEDULER,
        "        expected = self._expected.values()\n        fits = self._admission.try_open",
        "        expected = ()\n        fits = self._admission.try_open",
        _HOLDING,
    ),
    Mutant(
        "holding-reserves-more",
        "What is held for a return takes no slots but those that it has.",
        "engine/admission.py",
        "        if request.stage is Stage.HELD:\n            return 0\n",
        "",
        _HOLDING,
    ),
    Mutant(
        "returned-kv-dropped",
        "What came back is cache.",
        "engine/engine.py",
        "        self.scheduler.remove(request)\n        self._release(request, publish=True)\n",
        "        self.scheduler.remove(request)\n        self._release(request, publish=False)\n",
        ("tests/unit/prefill_worker/test_return_sink.py",),
    ),
    Mutant(
        "given-up-unannounced",
        "Who gives up a return ends its handoff first: until then its slots are written to.",
        "prefill_worker/return_sink.py",
        '        self._driver.abort_fetch(key, "others need the room")\n',
        "",
        ("tests/unit/prefill_worker/test_return_sink.py",),
    ),
    Mutant(
        "offer-of-another-incarnation",
        "An offer is of the process that the session is with, and meant for this one.",
        "kv_transfer/driver.py",
        "        if pair != (peer.incarnation, self._endpoint.hello.incarnation):\n",
        "        if not pair:\n",
        (_ENDS + "test_offers_that_mean_nothing_are_counted_and_no_more",),
    ),
    Mutant(
        "complete-overtakes-its-link",
        "The sink hears of a link generation before it is told that one carries everything.",
        "kv_transfer/session_links.py",
        "            self._session.send_at_once(begin)\n",
        "            self._session.send(begin)\n",
        (_ENDS + "test_an_answer_comes_back",),
    ),
    Mutant(
        "offer-of-an-old-answer",
        "Only what is cached now is offered.",
        "decode_worker/return_source.py",
        "        if request.sampling.n > 1 or held <= request.prompt_len:\n",
        "        if request.sampling.n > 1:\n",
        ("tests/unit/decode_worker/test_return_source.py",),
    ),
)
