"""All mutants, in the order in which they are tried."""

from __future__ import annotations

from tests.mutants.cache_mutants import CACHE_MUTANTS
from tests.mutants.engine_mutants import ENGINE_MUTANTS
from tests.mutants.file_mutants import FILE_MUTANTS
from tests.mutants.handoff_mutants import HANDOFF_MUTANTS
from tests.mutants.key_mutants import KEY_MUTANTS
from tests.mutants.model_mutants import MODEL_MUTANTS
from tests.mutants.pool_mutants import POOL_MUTANTS
from tests.mutants.protocol_mutants import PROTOCOL_MUTANTS
from tests.mutants.rank_mutants import RANK_MUTANTS
from tests.mutants.return_mutants import RETURN_MUTANTS
from tests.mutants.sample_mutants import SAMPLE_MUTANTS
from tests.mutants.slot_mutants import SLOT_MUTANTS
from tests.mutants.speculation_mutants import SPECULATION_MUTANTS
from tests.mutants.tier_mutants import TIER_MUTANTS
from tests.mutants.tree_mutants import TREE_MUTANTS
from tests.mutants.window_mutants import WINDOW_MUTANTS

GROUPS = {
    "tree": TREE_MUTANTS,
    "window": WINDOW_MUTANTS,
    "cache": CACHE_MUTANTS,
    "tier": TIER_MUTANTS,
    "key": KEY_MUTANTS,
    "slot": SLOT_MUTANTS,
    "pool": POOL_MUTANTS,
    "file": FILE_MUTANTS,
    "handoff": HANDOFF_MUTANTS,
    "protocol": PROTOCOL_MUTANTS,
    "engine": ENGINE_MUTANTS,
    "model": MODEL_MUTANTS,
    "rank": RANK_MUTANTS,
    "sample": SAMPLE_MUTANTS,
    "return": RETURN_MUTANTS,
    "speculation": SPECULATION_MUTANTS,
}
MUTANTS = tuple(mutant for group in GROUPS.values() for mutant in group)
SAMPLE = ("row-not-rewritten", "file-checksum-unchecked", "committed-before-it-is-there")
"""Tried on every change; the others take minutes."""
