"""Bugs of workers with several ranks: KV of one rank only, and ranks that part unnoticed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_HANDOFF_TESTS = "tests/integration/test_handoff_ranks.py"
_MODEL_TESTS = "tests/integration/test_model_ranks.py"
_GROUP = "engine/tensor_parallel_group.py"
_GROUP_TESTS = ("tests/unit/engine/test_tensor_parallel_group.py",)

RANK_MUTANTS = (
    Mutant(
        "layers-told-before-all-ranks-wrote-them",
        "KV may leave when every rank has written its heads of it.",
        "engine/decoder.py",
        "            projected = layer.output.apply(ops, attended, adapted)\n",
        "            if on_layers is not None and index + 1 < len(self._layers):\n"
        "                on_layers(index + 1)\n"
        "            projected = layer.output.apply(ops, attended, adapted)\n",
        (f"{_MODEL_TESTS}::test_layers_are_told_when_every_rank_has_written_them",),
    ),
    Mutant(
        "fork-copies-one-rank",
        "A fork copies what every rank holds of a token.",
        "mem_cache/kv_cache.py",
        "        for pool in self.rank_pools:\n",
        "        for pool in self.rank_pools[:1]:\n",
        ("tests/unit/mem_cache/test_factory.py",),
    ),
    Mutant(
        "heads-placed-as-at-the-source",
        "Heads are numbered within each rank.",
        "kv_transfer/protocol/lanes.py",
        "Heads(start - at_sink, stop - at_sink)",
        "Heads(start - at_source, stop - at_source)",
        ("tests/unit/kv_transfer/test_lanes.py",),
    ),
    Mutant(
        "a-lane-dies-alone",
        "The lanes of a generation end together.",
        "kv_transfer/session_links.py",
        "        if generation == self._generation and self._lanes:\n"
        "            self.close(reason)\n"
        "            self._session.link_ended(generation, reason)\n",
        "        if generation == self._generation and len(self._lanes) == 1:\n"
        "            self.close(reason)\n"
        "            self._session.link_ended(generation, reason)\n",
        (f"{_HANDOFF_TESTS}::test_the_death_of_one_lane_ends_its_generation_and_nothing_else",),
    ),
    Mutant(
        "a-failed-rank-stays-connected",
        "Nobody waits for a rank that has failed.",
        _GROUP,
        "            # After the reason is known: this wakes the others.\n"
        "            self._collective.close()\n",
        "",
        _GROUP_TESTS,
    ),
    Mutant(
        "columns-of-rank-0",
        "What a rank computes of the heads is joined with its part of the output's weights.",
        "engine/weights.py",
        "whole[:, shard.of(whole.shape[1])]",
        "whole[:, : whole.shape[1] // shard.ranks]",
        ("tests/unit/engine/test_tensor_parallel.py",),
    ),
)
