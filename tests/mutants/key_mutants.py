"""Bugs of what tells one KV from another: keys, hashes, layouts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_KEY = "kvferry/cache_key.py"
_KEY_TESTS = ("tests/unit/kvferry/test_cache_key.py",)
_LAYOUT = "mem_cache/layout.py"
_LAYOUT_TESTS = ("tests/unit/mem_cache/test_layout.py",)

KEY_MUTANTS = (
    Mutant(
        "salt-ignored",
        "A tenant's KV is read by nobody who does not know its salt.",
        _KEY,
        "json.dumps([model, adapter, salt],",
        "json.dumps([model, adapter],",
        _KEY_TESTS,
    ),
    Mutant(
        "parts-joined",
        "No name of a model, an adapter or a tenant can pass for two others.",
        _KEY,
        'json.dumps([model, adapter, salt], ensure_ascii=False, separators=(",", ":"))',
        '"/".join(json.dumps(part)[1:-1] for part in (model, adapter, salt))',
        _KEY_TESTS,
    ),
    Mutant(
        "element-type-not-in-the-layout",
        "KV of another element type is of another layout.",
        _LAYOUT,
        'f"NHD/{self.num_layers}/{heads}/{self.head_dim}/{self.dtype.value}"',
        'f"NHD/{self.num_layers}/{heads}/{self.head_dim}"',
        _LAYOUT_TESTS,
    ),
    Mutant(
        "block-hash-of-one-block",
        "A block's hash names the whole prefix.",
        "kvferry/kv_events.py",
        "block = previous + data[start : start + step]",
        "block = data[start : start + step]",
        ("tests/unit/kvferry/test_kv_events.py",),
    ),
)
