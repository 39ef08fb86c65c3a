"""Ledger check 1: each usable slot of a tier has exactly one owner, and each page one owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.ids import SlotIndices

_NAMED_MAX = 8
"""Slots named of one kind of violation."""


def check_owners(
    owned: Sequence[tuple[str, SlotIndices]], page_size: int, num_slots: int
) -> Iterator[str]:
    """Violations among owners, given by name with their slots; page 0 belongs to nobody."""
    everything = np.concatenate([slots for _, slots in owned])
    first, stop = page_size, page_size + num_slots
    outside = everything[(everything < first) | (everything >= stop)]
    if len(outside):
        yield f"check 1: slots out of range: {outside[:_NAMED_MAX].tolist()}"
        return
    owners = np.bincount(everything, minlength=stop)[first:]
    wrong = np.flatnonzero(owners != 1) + first
    # Faults come in pages: one slot stands for its page.
    _, one_per_page = np.unique(wrong // page_size, return_index=True)
    for slot in wrong[one_per_page][:_NAMED_MAX].tolist():
        names = [name for name, slots in owned if slot in slots]
        yield f"check 1: slot {slot} has {len(names)} owners: {', '.join(names) or 'lost'}"
    # All at once: one by one it would be most of an audit.
    cut_well = all(len(slots) % page_size == 0 for _, slots in owned)
    if cut_well and _are_whole_pages(everything, page_size):
        return
    for name, slots in owned:
        if not _are_whole_pages(slots, page_size):
            yield f"check 1: {name} does not own whole pages"


def _are_whole_pages(slots: SlotIndices, page_size: int) -> bool:
    if len(slots) % page_size:
        return False
    pages = slots.reshape(-1, page_size)
    in_order = (pages - pages[:, :1] == np.arange(page_size)).all()
    return bool(in_order and (pages[:, 0] % page_size == 0).all())
