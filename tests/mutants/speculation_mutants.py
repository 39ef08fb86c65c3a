"""Bugs of drafts: which guesses are kept, and what becomes of the others' slots."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ENGINE = "engine/engine.py"
_SPECULATION = "engine/speculation.py"
_EXACT = "tests/unit/engine/test_drafts_exact.py"
_RIGHT = (f"{_EXACT}::test_right_guesses_save_steps",)
_WRONG = (f"{_EXACT}::test_slots_of_wrong_guesses_are_free_after_the_step",)
_GRAMMAR = (f"{_EXACT}::test_constrained_answers_are_those_of_a_run_without_drafts",)
_NO_WAY_ON = (f"{_EXACT}::test_a_grammar_without_a_way_on_ends_all_samples_amid_their_drafts",)
_DRAFTS = ("tests/unit/engine/test_speculation.py",)

SPECULATION_MUTANTS = (
    Mutant(
        "wrong-guess-kept",
        "A guess is right if it is the token that was chosen.",
        _SPECULATION,
        "        self.is_over = int(request.tokens[request.num_tokens - 1]) != self.draft[at]\n",
        "        self.is_over = False\n",
        _WRONG,
    ),
    Mutant(
        "logits-of-the-place-before",
        "What follows a right guess is chosen from the logits behind it.",
        _SPECULATION,
        "        return self.logits_row + self.accepted\n",
        "        return self.logits_row + max(0, self.accepted - 1)\n",
        _RIGHT,
    ),
    Mutant(
        "grammar-not-asked-amid-a-draft",
        "The grammar is asked before each token, guessed or not.",
        _ENGINE,
        "not trial.passes() or self._look(request) is not Outlook.OPEN",
        "not trial.passes()",
        _GRAMMAR,
    ),
    Mutant(
        "ended-amid-a-draft-goes-on",
        "Who was ended amid a draft, by the grammar of another sample, gets no more tokens.",
        _ENGINE,
        "[trial for trial in passed if trial.request.stage is Stage.DECODING]",
        "passed",
        _NO_WAY_ON,
    ),
    Mutant(
        "wrong-guesses-keep-their-slots",
        "Slots of wrong guesses are free after the step.",
        _ENGINE,
        "                self.kv_cache.trim(trial.request.held_kv)\n",
        "                pass\n",
        _WRONG,
    ),
    Mutant(
        "guess-beyond-the-answer",
        "A draft ends before the last token of the longest answer.",
        _SPECULATION,
        "min(tokens, len(request.tokens) - 1 - item.stop)",
        "min(tokens, len(request.tokens) - item.stop)",
        _DRAFTS,
    ),
    Mutant(
        "guesses-take-all-slots",
        "Drafts share the slots that a step leaves.",
        _SPECULATION,
        "            slots -= max(0, _round_up(item.stop + len(draft), page_size) - own)\n",
        "",
        _DRAFTS,
    ),
)
