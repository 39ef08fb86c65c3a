import numpy as np
import pytest

from kvferry.ids import ExtraKey
from kvferry.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    event_block_tokens,
    prompt_block_hashes,
    unpack_hashes,
)
from mem_cache.radix_cache import RadixCache
from tests.support.kv_caches import PAGE_SIZES, SHARED, tokens_of

OTHER = ExtraKey("adapter-7")


class Filler:
    """A tree with fresh slot numbers for whatever is inserted."""

    def __init__(self, page_size):
        self.tree = RadixCache(page_size, event_block_tokens(page_size))
        self.page_size = page_size
        self.next_slot = page_size

    def insert(self, token_ids, extra_key=SHARED):
        slots = np.arange(self.next_slot, self.next_slot + len(token_ids), dtype=np.int64)
        self.next_slot += len(token_ids)
        return self.tree.insert(token_ids, slots, extra_key), slots

    def match(self, token_ids, extra_key=SHARED):
        return self.tree.match_prefix(token_ids, extra_key)

    def pages(self, *kinds):
        """A token for each kind, repeated to a page."""
        return tokens_of(kind for kind in kinds for _ in range(self.page_size))


@pytest.fixture(params=PAGE_SIZES)
def filler(request):
    return Filler(request.param)


def test_no_child_whole_edge_and_within_an_edge(filler):
    _, slots = filler.insert(filler.pages(1, 2, 3))
    assert filler.match(filler.pages(9, 2)).length == 0
    whole = filler.match(filler.pages(1, 2, 3, 4))
    assert whole.length == 3 * filler.page_size
    within = filler.match(filler.pages(1, 2, 9))
    assert within.length == 2 * filler.page_size
    assert within.last_device_node.end == within.length
    path = filler.tree.path_device_indices(within.last_device_node)
    assert path.tolist() == slots[: within.length].tolist()


def test_the_three_nodes_of_a_match_are_one_in_one_tier(filler):
    filler.insert(filler.pages(1))
    match = filler.match(filler.pages(1))
    assert match.last_device_node is match.last_host_node is match.best_match_node


def test_less_than_a_page_matches_nothing(filler):
    filler.insert(filler.pages(1, 2))
    almost = filler.pages(1, 2)[: 2 * filler.page_size - 1]
    assert filler.match(almost).length == len(almost) // filler.page_size * filler.page_size
    assert filler.match(tokens_of([])).length == 0


def test_a_difference_within_a_page_cuts_to_the_page_before(filler):
    filler.insert(filler.pages(1, 2, 3))
    changed = filler.pages(1, 2, 3)
    changed[-1] = 77
    assert filler.match(changed).length == 2 * filler.page_size


def test_insert_reports_what_was_there_and_keeps_its_own_slots(filler):
    _, first = filler.insert(filler.pages(1, 2))
    result, second = filler.insert(filler.pages(1, 2, 3))
    assert result.matched_len == 2 * filler.page_size
    path = filler.tree.path_device_indices(result.last_node)
    assert path.tolist() == [*first.tolist(), *second[2 * filler.page_size :].tolist()]
    again, _ = filler.insert(filler.pages(1, 2, 3))
    assert again.matched_len == 3 * filler.page_size
    assert again.last_node is result.last_node


def test_an_insert_that_ends_within_an_edge_splits_it(filler):
    filler.insert(filler.pages(1, 2, 3))
    result, _ = filler.insert(filler.pages(1, 2))
    assert result.matched_len == result.last_node.end == 2 * filler.page_size
    assert filler.tree.evictable_size() == 3 * filler.page_size


def test_insert_copies_the_slots(filler):
    slots = np.arange(filler.page_size, 2 * filler.page_size, dtype=np.int64)
    result = filler.tree.insert(filler.pages(1), slots, SHARED)
    expected = slots.tolist()
    slots[:] = 0
    assert filler.tree.path_device_indices(result.last_node).tolist() == expected


def test_insert_needs_a_slot_per_token(filler):
    slots = np.arange(filler.page_size + 1, dtype=np.int64)
    with pytest.raises(AssertionError, match="check 2"):
        filler.tree.insert(filler.pages(1), slots, SHARED)


def test_path_from_a_position_on(filler):
    for kinds in ((1,), (1, 2), (1, 2, 3)):
        result, _ = filler.insert(filler.pages(*kinds))
    whole = filler.tree.path_device_indices(result.last_node)
    for start in (0, 1, filler.page_size, 2 * filler.page_size + 1, len(whole)):
        part = filler.tree.path_device_indices(result.last_node, start)
        assert part.tolist() == whole[start:].tolist()


def test_extra_keys_never_share(filler):
    filler.insert(filler.pages(1, 2))
    assert filler.match(filler.pages(1, 2), OTHER).length == 0
    result, _ = filler.insert(filler.pages(1, 2), OTHER)
    assert result.matched_len == 0
    assert filler.tree.evictable_size() == 4 * filler.page_size
    assert filler.match(filler.pages(1, 2), OTHER).last_device_node is result.last_node


def test_a_split_inherits_lock_hits_priority_and_creation(filler):
    filler.insert(filler.pages(1, 2))
    lower = filler.match(filler.pages(1, 2)).last_device_node
    filler.tree.lock(lower)
    filler.tree.lock(lower)
    lower.priority = 5
    hits, created = lower.hit_count, lower.created_at
    upper = filler.match(filler.pages(1, 9)).last_device_node
    assert (upper.lock_ref, upper.priority, upper.created_at) == (2, 5, created)
    assert (upper.hit_count, lower.hit_count) == (hits + 1, hits)
    assert lower.parent is upper
    assert filler.tree.protected_size() == 2 * filler.page_size
    filler.tree.unlock(lower)
    filler.tree.unlock(lower)
    assert filler.tree.protected_size() == 0
    assert filler.tree.evictable_size() == 2 * filler.page_size


def test_lock_and_unlock_are_symmetric(filler):
    filler.insert(filler.pages(1))
    deep, _ = filler.insert(filler.pages(1, 2))
    side, _ = filler.insert(filler.pages(1, 3))
    size = filler.page_size
    filler.tree.lock(deep.last_node)
    filler.tree.lock(side.last_node)
    assert (filler.tree.protected_size(), filler.tree.evictable_size()) == (3 * size, 0)
    filler.tree.unlock(deep.last_node)
    assert (filler.tree.protected_size(), filler.tree.evictable_size()) == (2 * size, size)
    filler.tree.unlock(side.last_node)
    assert (filler.tree.protected_size(), filler.tree.evictable_size()) == (0, 3 * size)
    with pytest.raises(AssertionError, match="check 7"):
        filler.tree.unlock(side.last_node)


def test_eviction_takes_least_recent_leaves_and_then_their_parents(filler):
    size = filler.page_size
    _, first = filler.insert(filler.pages(1))
    _, deeper = filler.insert(filler.pages(1, 2))
    _, other = filler.insert(filler.pages(5, 6))
    filler.match(filler.pages(1, 2))
    assert filler.tree.evict(1).tolist() == other.tolist()
    assert filler.tree.evict(1).tolist() == deeper[size:].tolist()
    assert filler.tree.evict(1).tolist() == first.tolist()
    assert filler.tree.evict(1).tolist() == []
    assert filler.tree.evictable_size() == 0


def test_eviction_stops_when_it_has_enough(filler):
    size = filler.page_size
    for kind in range(4):
        filler.insert(filler.pages(kind))
    assert len(filler.tree.evict(2 * size)) == 2 * size
    assert len(list(filler.tree.nodes())) == 2


def test_locked_paths_are_not_evicted(filler):
    filler.insert(filler.pages(1))
    locked, _ = filler.insert(filler.pages(1, 2))
    _, free = filler.insert(filler.pages(1, 3))
    filler.tree.lock(locked.last_node)
    everything = filler.tree.evict(100 * filler.page_size)
    assert everything.tolist() == free[filler.page_size :].tolist()
    filler.tree.unlock(locked.last_node)
    assert len(filler.tree.evict(100 * filler.page_size)) == 2 * filler.page_size


def test_evicting_a_node_that_is_no_unlocked_leaf_is_our_bug(filler):
    locked, _ = filler.insert(filler.pages(1))
    filler.tree.lock(locked.last_node)
    with pytest.raises(AssertionError, match="check 5"):
        filler.tree._evict_leaf(locked.last_node)


def test_reset_gives_everything_back(filler):
    _, first = filler.insert(filler.pages(1, 2))
    _, second = filler.insert(filler.pages(1, 3))
    slots = filler.tree.reset()
    size = filler.page_size
    assert sorted(slots.tolist()) == sorted([*first.tolist(), *second[size:].tolist()])
    assert (filler.tree.evictable_size(), list(filler.tree.nodes())) == (0, [])
    assert filler.match(filler.pages(1)).length == 0
    assert len(filler.tree.evict(1)) == 0


def test_a_locked_tree_cannot_be_reset(filler):
    result, _ = filler.insert(filler.pages(1))
    filler.tree.lock(result.last_node)
    with pytest.raises(AssertionError, match="locked"):
        filler.tree.reset()


@pytest.mark.parametrize("extra_key", [SHARED, OTHER])
def test_stored_blocks_are_those_of_the_prompt_however_it_was_cut(filler, extra_key):
    """Inserting piece by piece, in pages smaller than a block, names the same blocks."""
    block = event_block_tokens(filler.page_size)
    text = tokens_of(range(5 * block))
    stored = []
    for end in range(filler.page_size, 5 * block + 1, filler.page_size):
        filler.insert(text[:end], extra_key)
        for event in filler.tree.take_events():
            assert isinstance(event, BlocksStored)
            stored.extend(event.block_hashes)
    assert stored == prompt_block_hashes(text, block, extra_key)
    assert set(filler.tree.snapshot_blocks()) == set(stored)


def test_a_split_parts_the_blocks_and_each_part_is_removed_with_its_node(filler):
    block = event_block_tokens(filler.page_size)
    text = tokens_of(range(4 * block))
    hashes = prompt_block_hashes(text, block, SHARED)
    filler.insert(text)
    filler.tree.take_events()
    upper = filler.match(text[: 2 * block + filler.page_size]).last_device_node
    parted = 2 if filler.page_size < block else 3
    assert list(upper.block_hashes) == hashes[:parted]
    assert filler.tree.take_events() == []
    filler.tree.evict(1)
    assert filler.tree.take_events() == [BlocksRemoved(tuple(hashes[parted:]))]
    filler.tree.evict(1)
    assert filler.tree.take_events() == [BlocksRemoved(tuple(hashes[:parted]))]


@pytest.mark.parametrize("extra_key", [SHARED, OTHER])
def test_blocks_to_come_are_all_of_a_prompt_unless_all_are_held(filler, extra_key):
    """Wherever the held part ends: between nodes, within one, within a block."""
    block = event_block_tokens(filler.page_size)
    text = tokens_of(range(5 * block))
    hashes = prompt_block_hashes(text, block, extra_key)
    for held in range(filler.page_size, 5 * block, filler.page_size):
        filler.insert(text[:held], extra_key)
        filler.tree.take_events()
        ticks = [node.last_access for node in filler.tree.nodes()]
        for length in range(0, 5 * block + 1, max(block // 2, 1)):
            digests = filler.tree.digests_to_come(text[:length], extra_key)
            full = length // block
            assert unpack_hashes(digests) == (hashes[:full] if full > held // block else [])
        strayed = np.concatenate((text[: held - 1], tokens_of(range(9000, 9000 + 2 * block))))
        found = filler.tree.digests_to_come(strayed, extra_key)
        assert unpack_hashes(found) == prompt_block_hashes(strayed, block, extra_key)
        assert [node.last_access for node in filler.tree.nodes()] == ticks
        assert filler.tree.take_events() == []


def test_reset_is_told_as_cleared(filler):
    filler.insert(filler.pages(*range(32)))
    filler.tree.reset()
    assert filler.tree.take_events() == [AllBlocksCleared()]
    assert filler.tree.take_events() == []


def test_blocks_are_whole_pages():
    with pytest.raises(AssertionError, match="whole pages"):
        RadixCache(page_size=16, block_tokens=24)


def test_keys_of_the_same_first_token_part_within_the_page():
    """A page, not its first token, finds a child."""
    filler = Filler(4)
    filler.insert(tokens_of([1, 2, 3, 4]))
    filler.insert(tokens_of([1, 2, 3, 5]))
    assert filler.match(tokens_of([1, 2, 3, 5])).length == 4
    assert filler.match(tokens_of([1, 2, 3, 6])).length == 0


@pytest.mark.parametrize("token", [0, 255, 256, 65_536, 2**31 - 1])
def test_every_token_id_is_told_apart(token):
    filler = Filler(1)
    filler.insert(tokens_of([token, 1]))
    assert filler.match(tokens_of([token, 1])).length == 2
    assert filler.match(tokens_of([token ^ 256, 1])).length == 0
    assert filler.match(tokens_of([token, 257])).length == 1


def test_blocks_of_an_edge_that_begins_within_a_block_part_at_the_right_one(filler):
    block = event_block_tokens(filler.page_size)
    text = tokens_of(range(4 * block))
    filler.insert(text[: filler.page_size])
    filler.insert(text)
    hashes = prompt_block_hashes(text, block, SHARED)
    upper = filler.match(text[: 2 * block]).last_device_node
    (lower,) = upper.children.values()
    assert list(lower.block_hashes) == hashes[2:]


def test_an_insert_of_a_broken_page_leaves_it_out(filler):
    size = filler.page_size
    _, slots = filler.insert(tokens_of(range(3 * size - 1)))
    whole = (3 * size - 1) // size * size
    assert filler.tree.evictable_size() == whole
    assert filler.tree.evict(1).tolist() == slots[:whole].tolist()
