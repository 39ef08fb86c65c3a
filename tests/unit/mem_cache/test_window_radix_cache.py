import numpy as np
import pytest

from kvferry.config import EvictionPolicy
from kvferry.kv_events import event_block_tokens, prompt_block_hashes, unpack_hashes
from mem_cache.attention_window import AttentionWindow
from mem_cache.radix_cache import RadixCache
from mem_cache.window_radix_cache import WindowRadixCache
from tests.support.kv_caches import PAGE_SIZES, SHARED, tokens_of
from tests.support.kv_model import apply_events
from tests.support.window_model import (
    WindowModel,
    assert_shape,
    expected_eviction,
    tree_pages,
)


class Filler:
    """A tree with a window of `pages` pages, and fresh slot numbers for whatever is inserted."""

    def __init__(self, page_size, pages, policy=EvictionPolicy.LRU):
        self.page_size = page_size
        # The query itself is in its window: one token more needs the whole last page.
        window = AttentionWindow.of(pages * page_size + 1, page_size)
        self.tree = WindowRadixCache(page_size, event_block_tokens(page_size), window, policy)
        self.next_slot = page_size

    def slots(self, count):
        slots = np.arange(self.next_slot, self.next_slot + count, dtype=np.int64)
        self.next_slot += count
        return slots

    def insert(self, token_ids, owned_from=0):
        slots = self.slots(len(token_ids))
        return self.tree.insert(token_ids, slots, SHARED, owned_from=owned_from), slots

    def match(self, token_ids):
        return self.tree.match_prefix(token_ids, SHARED)

    def pages(self, *kinds):
        """A token for each kind, repeated to a page."""
        return tokens_of(kind for kind in kinds for _ in range(self.page_size))

    def live(self):
        """For each node with slots, parents first: its first and last page number."""
        size = self.page_size
        return [(n.start // size, n.end // size) for n in self.tree.nodes() if n.on_device]


@pytest.fixture(params=PAGE_SIZES)
def filler(request):
    return Filler(request.param, pages=2)


def test_a_match_needs_its_window_only(filler):
    text = filler.pages(1, 2, 3, 4, 5)
    filler.insert(text, owned_from=3 * filler.page_size)
    assert filler.match(text).length == 5 * filler.page_size
    # A prefix that ends earlier would read pages nobody has.
    assert filler.match(text[: 4 * filler.page_size]).length == 0
    path = filler.tree.path_device_indices(filler.match(text).last_device_node, 3 * len(text) // 5)
    assert path.tolist() == list(range(4 * filler.page_size, 6 * filler.page_size))


def test_near_the_start_the_window_is_cut_at_the_start(filler):
    text = filler.pages(1, 2, 3)
    filler.insert(text)
    assert filler.match(filler.pages(1)).length == filler.page_size
    assert filler.match(filler.pages(1, 9)).length == filler.page_size


def test_an_inner_node_becomes_a_tombstone_and_the_rest_stays_usable(filler):
    text = filler.pages(1, 2, 3, 4, 5)
    result, slots = filler.insert(text)
    filler.tree.lock(result.last_node, 3 * filler.page_size)
    assert filler.tree.evictable_size() == 3 * filler.page_size
    freed = filler.tree.evict(1)
    assert freed.tolist() == slots[: 3 * filler.page_size].tolist()
    assert filler.tree.evictable_size() == 0
    assert filler.live() == [(3, 5)]
    assert filler.match(text).length == 5 * filler.page_size
    assert filler.match(text[: 4 * filler.page_size]).length == 0
    assert filler.tree.evict(1).tolist() == []
    filler.tree.unlock(result.last_node, 3 * filler.page_size)


def test_a_leaf_goes_with_the_tombstones_that_led_to_it_alone(filler):
    size = filler.page_size
    long, branch = filler.pages(1, 2, 3, 4, 5), filler.pages(1, 7)
    filler.insert(long, owned_from=3 * size)
    filler.insert(branch, owned_from=size)
    filler.match(branch)
    assert len(list(filler.tree.nodes())) == 4
    assert len(filler.tree.evict(2 * size)) == 2 * size
    # The page both paths have in common still leads to the branch.
    assert [(n.start // size, n.end // size) for n in filler.tree.nodes()] == [(0, 1), (1, 2)]
    assert len(filler.tree.evict(1)) == size
    assert not list(filler.tree.nodes())


def test_insert_fills_tombstones_and_reports_duplicates_between_them(filler):
    size = filler.page_size
    text = filler.pages(1, 2, 3, 4, 5, 6)
    first, _ = filler.insert(text[: 4 * size], owned_from=2 * size)
    result, slots = filler.insert(text)
    # Pages 0 and 1 were nobody's, 2 and 3 were there, 4 and 5 are new.
    assert result.duplicates.tolist() == slots[2 * size : 4 * size].tolist()
    assert result.matched_len == 2 * size
    assert filler.tree.evictable_size() == 6 * size
    path = filler.tree.path_device_indices(result.last_node)
    assert path[: 2 * size].tolist() == slots[: 2 * size].tolist()
    assert path[4 * size :].tolist() == slots[4 * size :].tolist()
    assert filler.match(text[: 3 * size]).length == 3 * size
    assert first.matched_len == 2 * size


def test_insert_fills_a_tombstone_from_the_first_owned_page_on(filler):
    size = filler.page_size
    text = filler.pages(1, 2, 3, 4, 5)
    filler.insert(text, owned_from=4 * size)
    result, slots = filler.insert(text, owned_from=2 * size)
    assert result.duplicates.tolist() == slots[4 * size :].tolist()
    assert filler.live() == [(2, 4), (4, 5)]
    assert_shape(filler.tree, [])


def test_insert_of_nothing_owned_changes_nothing(filler):
    text = filler.pages(1, 2)
    result, _ = filler.insert(text, owned_from=len(text))
    assert result.last_node is filler.tree.root
    assert not list(filler.tree.nodes())


def test_locks_survive_splits_and_end_exactly(filler):
    size = filler.page_size
    text = filler.pages(1, 2, 3, 4, 5, 6)
    result, _ = filler.insert(text)
    tree, node = filler.tree, result.last_node
    tree.lock(node, 2 * size)
    tree.lock(node, size)
    assert tree.protected_size() == 5 * size
    filler.insert(filler.pages(1, 2, 3, 9))
    filler.match(filler.pages(1, 2, 3, 4, 5, 9))
    assert_shape(tree, [(node, 2 * size), (node, size)])
    # The window slides: the new lock before the old one is undone.
    tree.lock(node, 4 * size)
    tree.unlock(node, 2 * size)
    assert_shape(tree, [(node, 4 * size), (node, size)])
    tree.unlock(node, size)
    assert tree.protected_size() == 2 * size
    tree.unlock(node, 4 * size)
    assert tree.protected_size() == 0
    assert tree.evictable_size() == 7 * size


def test_a_lock_from_the_end_on_protects_nothing(filler):
    result, _ = filler.insert(filler.pages(1, 2))
    filler.tree.lock(result.last_node, result.last_node.end)
    assert filler.tree.protected_size() == 0
    filler.tree.unlock(result.last_node, result.last_node.end)


def test_a_tombstone_cannot_be_locked(filler):
    text = filler.pages(1, 2, 3)
    result, _ = filler.insert(text, owned_from=filler.page_size)
    with pytest.raises(AssertionError, match=r"check 7: .* is locked and has no slots"):
        filler.tree.lock(result.last_node, 0)


def test_unlocking_what_was_not_locked_is_a_fault(filler):
    result, _ = filler.insert(filler.pages(1, 2, 3))
    with pytest.raises(AssertionError, match=r"check 7: .* more often than locked"):
        filler.tree.unlock(result.last_node)
    filler.tree.lock(result.last_node, filler.page_size)
    with pytest.raises(AssertionError, match=r"check 7: .* was not locked from"):
        filler.tree.unlock(result.last_node, 2 * filler.page_size)


def test_what_only_leads_to_a_match_grows_old(filler):
    size = filler.page_size
    text, other = filler.pages(1, 2, 3, 4, 5), filler.pages(9)
    filler.insert(text)
    filler.insert(other)
    filler.match(text)
    # Least recent: the pages left of the window, then the other text, then the window.
    assert len(filler.tree.evict(1)) == 3 * size
    assert filler.match(text).length == 5 * size
    assert len(filler.tree.evict(1)) == size
    assert filler.match(other).length == 0
    assert filler.match(text).length == 5 * size


def test_a_chunk_after_the_other_leaves_the_oldest_first(filler):
    size = filler.page_size
    text = filler.pages(1, 2, 3, 4, 5, 6)
    tree = filler.tree
    node, start = tree.root, 0
    for end in range(2, 7, 2):
        result, _ = filler.insert(text[: end * size], owned_from=(end - 2) * size)
        tree.lock(result.last_node, start)
        tree.unlock(node, start)
        node = result.last_node
        new_start = tree.window.needed_from(end * size)
        tree.lock(node, new_start)
        tree.unlock(node, start)
        start = new_start
    tree.unlock(node, start)
    for begin in range(3):
        assert filler.live()[0][0] == 2 * begin
        assert len(tree.evict(1)) == 2 * size


def test_a_block_is_stored_while_the_node_it_ends_in_has_slots(filler):
    size, tree = filler.page_size, filler.tree
    block = tree.block_tokens
    pages_per_block = block // size
    text = filler.pages(*range(1, 4 * pages_per_block + 1))
    hashes = prompt_block_hashes(text, block, SHARED)
    view: set[int] = set()
    first_owned = 2 * block
    result, _ = filler.insert(text, owned_from=first_owned)
    apply_events(view, tree.take_events())
    assert view == set(hashes[2:])
    assert unpack_hashes(tree.digests_to_come(text, SHARED)) == hashes, "tombstones are not held"
    tree.lock(result.last_node, 3 * block)
    tree.evict(1)
    apply_events(view, tree.take_events())
    assert view == set(tree.snapshot_blocks()) == set(hashes[3:])
    filler.insert(text)
    apply_events(view, tree.take_events())
    assert view == set(tree.snapshot_blocks()) == set(hashes)
    assert tree.digests_to_come(text, SHARED) == b""
    tree.unlock(result.last_node, 3 * block)
    tree.evict(len(text))
    apply_events(view, tree.take_events())
    assert not view


def test_reset_gives_back_the_slots_of_live_nodes(filler):
    text = filler.pages(1, 2, 3, 4)
    _, slots = filler.insert(text, owned_from=2 * filler.page_size)
    assert filler.tree.reset().tolist() == slots[2 * filler.page_size :].tolist()
    assert filler.tree.evictable_size() == 0
    assert filler.match(text).length == 0


def _random_text(rng, pages, page_size):
    """One of two texts up to a fork, then one of three others: most share pages."""
    length = int(rng.integers(1, pages + 1)) * page_size
    kinds = np.full(pages, rng.integers(2, 5), dtype=np.int32)
    kinds[: rng.integers(0, pages + 1)] = rng.integers(0, 2)
    return np.repeat(kinds, page_size)[:length]


NESTED = [p for p in EvictionPolicy if p not in (EvictionPolicy.FIFO, EvictionPolicy.MRU)]
"""Policies that rank no node before its descendants."""


@pytest.mark.parametrize("policy", NESTED)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_window_longer_than_every_key_is_a_radix_cache(page_size, policy):
    rng = np.random.default_rng(11)
    block = event_block_tokens(page_size)
    window = AttentionWindow.of(12 * page_size + 1, page_size)
    trees = (
        RadixCache(page_size, block, policy),
        WindowRadixCache(page_size, block, window, policy),
    )
    handles: list[tuple] = []
    next_slot = page_size
    seen = {"hit": 0, "evicted": 0}
    for _ in range(400):
        text = _random_text(rng, 12, page_size)
        match rng.integers(0, 4):
            case 0 | 1:
                slots = np.arange(next_slot, next_slot + len(text))
                next_slot += len(text)
                priority = int(rng.integers(0, 3))
                results = [t.insert(text, slots, SHARED, priority=priority) for t in trees]
                assert results[0].matched_len == results[1].matched_len
                assert results[0].duplicates.tolist() == results[1].duplicates.tolist()
            case 2:
                matches = [t.match_prefix(text, SHARED) for t in trees]
                assert matches[0].length == matches[1].length
                seen["hit"] += matches[0].length > 0
                nodes = [m.last_device_node for m in matches]
                paths = [
                    t.path_device_indices(n).tolist() for t, n in zip(trees, nodes, strict=True)
                ]
                assert paths[0] == paths[1]
                for tree, node in zip(trees, nodes, strict=True):
                    tree.lock(node)
                handles.append(tuple(nodes))
                if len(handles) > 3:
                    for tree, node in zip(trees, handles.pop(0), strict=True):
                        tree.unlock(node)
            case 3:
                count = int(rng.integers(1, 6 * page_size))
                freed = [t.evict(count).tolist() for t in trees]
                assert freed[0] == freed[1]
                seen["evicted"] += bool(freed[0])
        assert trees[0].evictable_size() == trees[1].evictable_size()
        assert trees[0].take_events() == trees[1].take_events()
    assert min(seen.values()) > 20


class RandomTree:
    """Random operations on a tree and on the model, compared after each."""

    def __init__(self, page_size, window, policy, seed):
        self.rng = np.random.default_rng(seed)
        self.window = AttentionWindow(window, page_size, page_size)
        self.policy = policy
        self.tree = WindowRadixCache(page_size, event_block_tokens(page_size), self.window, policy)
        self.model = WindowModel(page_size, window)
        self.page_size = page_size
        self.handles = []
        self.view: set[int] = set()
        self.next_slot = page_size
        self.steps = 0
        self.seen = {"hit": 0, "hole": 0, "duplicate": 0, "inner": 0, "slid": 0}

    def open(self):
        text = _random_text(self.rng, 12, self.page_size)
        match = self.tree.match_prefix(text, SHARED)
        assert match.length == match.last_device_node.end == self.model.match_len(SHARED, text)
        self.seen["hit"] += match.length > 0
        keys = self.model.keys(SHARED, text, len(text))
        # Cached further on, but with a hole in the window.
        self.seen["hole"] += any(
            k in self.model.pages for k in keys[match.length // self.page_size :]
        )
        start = self.model.needed_from(match.length)
        self.tree.lock(match.last_device_node, start)
        self.handles.append([match.last_device_node, start, text])

    def publish(self):
        handle = self.handles[self.rng.integers(len(self.handles))]
        node, start, text = handle
        protected = max(node.end, start)
        if protected >= len(text):
            return
        fresh = np.arange(self.next_slot, self.next_slot + len(text))
        self.next_slot += len(text)
        result = self.tree.insert(text, fresh, SHARED, owned_from=protected)
        duplicates = self.model.insert(SHARED, text, fresh.tolist(), protected)
        assert result.duplicates.tolist() == duplicates
        assert result.matched_len == protected + len(duplicates)
        self.seen["duplicate"] += bool(duplicates)
        self.tree.lock(result.last_node, start)
        self.tree.unlock(node, start)
        handle[0] = result.last_node

    def slide(self):
        handle = self.handles[self.rng.integers(len(self.handles))]
        node, start, text = handle
        new_start = max(start, self.model.needed_from(int(self.rng.integers(0, len(text) + 1))))
        if new_start > node.end:
            self.tree.unlock(node, start)
            node = self.tree.root
        else:
            self.tree.lock(node, new_start)
            self.tree.unlock(node, start)
        handle[:2] = node, new_start
        self.seen["slid"] += new_start > start

    def close(self):
        node, start, _ = self.handles.pop(self.rng.integers(len(self.handles)))
        self.tree.unlock(node, start)

    def evict(self):
        count = int(self.rng.integers(1, 6 * self.page_size))
        expected = expected_eviction(self.tree, self.policy, count)
        slots = [slot for node in expected for slot in node.value.tolist()]
        self.seen["inner"] += any(node.children for node in expected)
        assert self.tree.evict(count).tolist() == slots
        gone = set(slots)
        self.model.pages = {k: v for k, v in self.model.pages.items() if not gone & set(v)}

    def step(self):
        choices = [self.open, self.evict]
        if self.handles:
            choices += [self.publish, self.publish, self.slide, self.close]
        choices[self.rng.integers(len(choices))]()
        self.steps += 1
        self.check()

    def run(self, *worth_seeing):
        """Some steps, and more until everything worth seeing happened."""
        while self.steps < 120 or (
            self.steps < 1000 and not all(self.seen[name] for name in worth_seeing)
        ):
            self.step()
        assert all(self.seen[name] for name in worth_seeing), self.seen

    def check(self):
        pages = tree_pages(self.tree)
        assert pages == self.model.pages
        slots = [slot for page in pages.values() for slot in page]
        assert len(set(slots)) == len(slots)
        assert_shape(self.tree, [(node, start) for node, start, _ in self.handles])
        for node, start, text in self.handles:
            first, last = start // self.page_size, node.end // self.page_size
            keys = self.model.keys(SHARED, text, len(text))[first:last]
            path = self.tree.path_device_indices(node, start).tolist()
            assert path == [slot for key in keys for slot in pages[key]]
        apply_events(self.view, self.tree.take_events())
        assert self.view == set(self.tree.snapshot_blocks()) == self.model.block_hashes()


@pytest.mark.parametrize("policy", EvictionPolicy)
@pytest.mark.parametrize(("page_size", "window"), [(1, 3), (4, 9), (64, 150)])
def test_agrees_with_the_model(page_size, window, policy):
    run = RandomTree(page_size, window, policy, seed=page_size + window)
    run.run("hit", "hole", "duplicate", "inner", "slid")


@pytest.mark.parametrize(("page_size", "window"), [(1, 2), (1, 30), (4, 3), (16, 16), (16, 500)])
def test_agrees_with_the_model_for_windows_of_a_page_and_of_everything(page_size, window):
    run = RandomTree(page_size, window, EvictionPolicy.LRU, seed=page_size + window)
    run.run("hit", "duplicate")
