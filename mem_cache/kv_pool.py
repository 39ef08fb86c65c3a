"""What holds the KV bytes of a worker, and how many slots a memory budget buys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvferry.ids import SlotIndices
    from mem_cache.layout import KvPart, PagedLayout

_ROW_ENTRY_BYTES = 4


class KvPool(Protocol):
    """The stored KV of a worker, by slot. Made by `mem_cache.pool_choice.build_kv_pool`.

    A layer holds two vectors per token, of any floating type and the shape of the layout: K and V
    [T, H_kv, D], or the latent [T, R] and the rotated part [T, D_rope].

    Per step and layer the model calls `write`, or writes to `layer` itself, and reads for
    attention. `gather` and `scatter` move tokens to other pools and tiers as they are stored.

    A payload is uint8 `[layers, planes, tokens, heads, unit_bytes]`, layers and heads those of a
    `KvPart`, token by token in either arrangement and for any page size, each unit with its scale:
    pools of equal `exchange_hash` exchange it byte for byte, and its last two dimensions are one
    token of one plane. Its memory begins at a multiple of 16 bytes or of the bytes of one token of
    the part, as a tensor of its own does.
    """

    buffer: torch.Tensor
    """All of it, in the stored element type; see `PagedPool`."""
    num_slots: int
    """Usable slots; the dummy page comes on top."""

    @property
    def layout(self) -> PagedLayout:
        """Shape, element type and page size."""
        ...

    @property
    def in_place_dtype(self) -> torch.dtype | None:
        """The element type of `layer`, if that is K and V as [N_slot, H_kv, D]; else None."""
        ...

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of what a layer stores, in the pool's own arrangement and element type."""
        ...

    def write(
        self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        """Encode and store the two vectors of each token of `slots` (int64 [T])."""
        ...

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the two vectors of each token of `slots` (int64 [T]), as float32."""
        ...

    def copy(self, source: SlotIndices, target: SlotIndices) -> None:
        """Copy all that slots hold to as many others; none may be in both."""
        ...

    def payload_bytes(self, num_tokens: int, part: KvPart) -> int:
        """Bytes that `gather` writes and `scatter` reads for this part of so many tokens."""
        ...

    def gather(self, slots: SlotIndices, part: KvPart, out: torch.Tensor) -> int:
        """Copy this part of `slots` to the head of `out` (uint8, 1-D); returns the payload's bytes.

        Any thread may, while nobody writes to these slots.
        """
        ...

    def scatter(self, slots: SlotIndices, part: KvPart, payload: torch.Tensor) -> None:
        """Copy a payload made by `gather` (uint8, 1-D) into this part of `slots`.

        Any thread may, while nobody else reads or writes these slots.
        """
        ...


def slots_for_budget(
    memory_bytes: int, layout: PagedLayout, rows: int, context_length: int, ranks: int = 1
) -> int:
    """Usable slots, in whole pages, that fit a budget with the row table and dummy page 0.

    `ranks`: pools of this layout, one per tensor-parallel rank, that share the budget. Raises
    `ConfigError` naming `cache.memory_bytes` if not even one request of `context_length` tokens
    would fit: it could be admitted but never finish.
    """
    width = layout.round_up(context_length)
    token_bytes = ranks * layout.bytes_per_token
    row_table = _ROW_ENTRY_BYTES * (rows + 1) * width
    fixed = row_table + layout.page_size * token_bytes
    slots = layout.round_down(max(0, memory_bytes - fixed) // token_bytes)
    if slots < width:
        needed = fixed + width * token_bytes
        raise ConfigError(
            "cache.memory_bytes",
            f"is {memory_bytes}; a request of {context_length} tokens (model.context_length) and "
            f"the table of {rows} rows need {needed}",
        )
    return slots
