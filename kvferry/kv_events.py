"""What a worker's radix cache holds, told in hashes: the language between tree and router.

A *block* is `block_tokens` consecutive tokens counted from the start of a prompt. Its hash
chains over the blocks before it and the extra key, so one hash names a whole prefix. Workers
emit events over these hashes, and the router's index is made of nothing else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NewType, TypeAlias

import numpy as np

from kvferry.limits import KV_EVENT_BLOCK_TOKENS_MIN

if TYPE_CHECKING:
    from kvferry.ids import ExtraKey, Incarnation, TokenIds, WorkerId

BlockHash = NewType("BlockHash", int)
"""64 bits. A collision costs a wrong routing hint, never a wrong token."""

BLOCK_DIGEST_BYTES = 8
"""A block hash as bytes, little-endian: how many of them are kept in little memory."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """The cache now holds these blocks, in device or host memory."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The cache no longer holds these blocks, in neither memory."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """What one worker says of its cache: changes, a snapshot, or a mark.

    Changes have events. They are numbered from 1 over the life of the incarnation, without a gap,
    and are the same for every reader. A snapshot or a mark has the number of the last changes
    before it.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    sequence: int
    snapshot: bool
    """True: all that the worker holds; replaces everything known of it."""
    events: tuple[KvEvent, ...]
    """Empty for a mark, which says that there have been no changes beyond `sequence`."""
    expected: tuple[bytes, ...] = ()
    """Prompts that the worker has accepted and not begun to compute: of each the digests of all
    its full blocks, one after the other. No change: nothing is held yet."""


def event_block_tokens(page_size: int) -> int:
    """Tokens per event block: the smallest multiple of the page size that is large enough."""
    pages = -(-KV_EVENT_BLOCK_TOKENS_MIN // page_size)
    return page_size * pages


def chain_root(extra_key: ExtraKey) -> BlockHash:
    """The hash before the first block of any prompt with this extra key."""
    return BlockHash(int.from_bytes(chain_root_digest(extra_key), "little"))


@functools.lru_cache(maxsize=1024)
def chain_root_digest(extra_key: ExtraKey) -> bytes:
    """`chain_root` as a digest."""
    return blake2b(
        extra_key.encode(), digest_size=BLOCK_DIGEST_BYTES, person=b"kvferry-root"
    ).digest()


def chain_hashes(parent: BlockHash, token_ids: TokenIds, block_tokens: int) -> list[BlockHash]:
    """Hash of each full block of `token_ids`, whose first token starts a block after `parent`.

    Each is BLAKE2b-64 (RFC 7693) over the hash before it and the block's little-endian int32
    ids. The rest of the tokens that fills no block is ignored.
    """
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    previous = parent.to_bytes(BLOCK_DIGEST_BYTES, "little")
    return unpack_hashes(chain_digests(previous, data, block_tokens))


def chain_digests(previous: bytes, data: bytes, block_tokens: int) -> bytes:
    """As `chain_hashes`, from little-endian int32 ids to digests, one after the other."""
    step = 4 * block_tokens
    digests: list[bytes] = []
    for start in range(0, len(data) - step + 1, step):
        block = previous + data[start : start + step]
        previous = blake2b(block, digest_size=BLOCK_DIGEST_BYTES).digest()
        digests.append(previous)
    return b"".join(digests)


def unpack_hashes(digests: bytes) -> list[BlockHash]:
    """The block hashes that these digests are."""
    hashes: list[BlockHash] = np.frombuffer(digests, dtype="<u8").tolist()
    return hashes


def prompt_block_hashes(
    token_ids: TokenIds, block_tokens: int, extra_key: ExtraKey
) -> list[BlockHash]:
    """Hashes of all full blocks of a prompt, first block first."""
    return chain_hashes(chain_root(extra_key), token_ids, block_tokens)
