"""A device pool over a host pool, for tests that drive every copy."""

from __future__ import annotations

import numpy as np

from kvferry.ids import ExtraKey
from tests.support.kv_caches import (
    SHARED,
    compute,
    tiered_cache,
    tokens_of,
    write_stamps,
)
from tests.support.manual_copier import ManualCopier


class Scene:
    """A device pool of 8 pages over a host pool of 32, and a copier that the test drives."""

    def __init__(self, page_size=4, **options):
        self.copier = ManualCopier()
        self.cache = tiered_cache(page_size, self.copier, **options)
        self.size = page_size

    def pages(self, first, count, tail=1):
        """`count` pages of tokens that no other first page has, and a few of a partial page."""
        return tokens_of(range(1000 * first, 1000 * first + count * self.size + tail))

    def publish(self, text):
        kv = self.cache.open("publisher", text, SHARED)
        compute(self.cache, kv, text, len(text))
        self.cache.release(kv, text)
        self.settle()

    def settle(self):
        self.copier.run_all()
        return self.cache.poll()

    def push_out(self):
        """Take every slot of the device for a moment."""
        kv = self.cache.open("big", tokens_of([7]), ExtraKey("big"))
        self.cache.extend(kv, 8 * self.size)
        slots = self.cache.slots(kv, 0, 8 * self.size)
        write_stamps(self.cache, slots, np.full((len(slots), 2), -1.0, dtype=np.float32))
        self.cache.release(kv, None)

    def on_host(self, text):
        """Have a text on the host only."""
        self.publish(text)
        self.push_out()
        assert self.cache.accounts().free == self.cache.num_slots

    def open(self, text, name="a"):
        return self.cache.open(name, text, SHARED)


def scene_on_host(page_size=4, pages=3, **options):
    scene = Scene(page_size, **options)
    text = scene.pages(1, pages)
    scene.on_host(text)
    return scene, text
