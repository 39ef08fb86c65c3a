"""Bugs of how KV is stored, moved and read back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_POOL = "mem_cache/paged_pool.py"
_CODEC = "mem_cache/element_codec.py"
_LAYOUT = "mem_cache/layout.py"
_POOL_TESTS = ("tests/contract/test_kv_pools.py", "tests/unit/mem_cache/test_mha_pool.py")
_MOVE_TESTS = ("tests/contract/test_kv_pools.py::test_neighbouring_slots_are_moved_like_others",)
_CODEC_TESTS = ("tests/unit/mem_cache/test_element_codec.py",)
_LAYOUT_TESTS = ("tests/unit/mem_cache/test_layout.py",)
_EXCHANGE_TESTS = (
    "tests/contract/test_kv_pools.py::test_layouts_of_other_bytes_do_not_exchange",
    *_LAYOUT_TESTS,
)
_MODEL_TESTS = (
    "tests/integration/test_model_over_pools.py::test_a_half_precision_model_over_every_pool",
)

POOL_MUTANTS = (
    Mutant(
        "pages-token-by-token",
        "Head by head, a page is what a kernel reads, not only what the pool itself wrote.",
        _POOL,
        "        first = (slots - within) * layout.heads + within\n"
        "        heads = torch.arange(part.head_start, part.head_stop, device=slots.device)\n"
        "        of_plane = (first[:, None] + heads * layout.page_size).view(-1)\n",
        "        first = slots * layout.heads + 0 * within\n"
        "        heads = torch.arange(part.head_start, part.head_stop, device=slots.device)\n"
        "        of_plane = (first[:, None] + heads).view(-1)\n",
        _POOL_TESTS,
    ),
    Mutant(
        "layers-from-the-first",
        "A payload of some layers is of those layers.",
        _POOL,
        "layers[part.layer_start : part.layer_stop].view(",
        "layers[: part.layers].view(",
        _MOVE_TESTS,
    ),
    Mutant(
        "heads-from-the-first",
        "A payload of some heads is of those heads.",
        _POOL,
        "start, stop = part.head_start * unit, part.head_stop * unit",
        "start, stop = 0, part.heads * unit",
        _MOVE_TESTS,
    ),
    Mutant(
        "heads-of-a-page-from-the-first",
        "The same where a page is stored head by head.",
        _POOL,
        "pages[:, :, part.head_start : part.head_stop].transpose(2, 3)",
        "pages[:, :, : part.heads].transpose(2, 3)",
        _MOVE_TESTS,
    ),
    Mutant(
        "runs-from-the-first-slot-of-a-page",
        "A run may begin within a page.",
        _POOL,
        "pages[:, page : page + count, within : within + each]",
        "pages[:, page : page + count, :each]",
        _MOVE_TESTS,
    ),
    Mutant(
        "runs-not-cut-at-pages",
        "Where a page is stored head by head, a run that ends within one is cut there.",
        "mem_cache/slot_runs.py",
        "whole = (run.tokens - head) // page_size * page_size",
        "whole = run.tokens - head",
        ("tests/unit/mem_cache/test_slot_runs.py",),
    ),
    Mutant(
        "planes-on-top-of-one-another",
        "K and V of a slot are different memory.",
        _POOL,
        "return (planes[:, None] * physical + slots).view(-1)",
        "return (planes[:, None] // layout.planes * physical + slots).view(-1)",
        _MOVE_TESTS,
    ),
    Mutant(
        "infinity-stored",
        "A number beyond a narrow type becomes its largest, never an infinity.",
        _CODEC,
        "            values = values.clamp(-self._largest, self._largest)\n",
        "            pass\n",
        _CODEC_TESTS,
    ),
    Mutant(
        "rounded-towards-zero",
        "int8 is off by at most half a step.",
        _CODEC,
        "(wide / scale).round_()",
        "(wide / scale).trunc_()",
        _CODEC_TESTS,
    ),
    Mutant(
        "zeros-divided-by-zero",
        "A vector of zeros has quotients that are defined.",
        _CODEC,
        ".clamp_(min=_SCALE_MIN)",
        "",
        _CODEC_TESTS,
    ),
    Mutant(
        "exchanged-between-types",
        "Workers whose KV has other element types never exchange it.",
        _LAYOUT,
        'f"NHD/{self.num_layers}/{heads}/{self.head_dim}/{self.dtype.value}"',
        'f"NHD/{self.num_layers}/{heads}/{self.head_dim}/{self.unit_bytes}"',
        _EXCHANGE_TESTS,
    ),
    Mutant(
        "pages-in-the-exchange",
        "Workers of different page sizes exchange KV.",
        _LAYOUT,
        "        token_format = self._token_format(ranks)\n",
        '        token_format = f"{self._token_format(ranks)}/{self.page_size}"\n',
        _EXCHANGE_TESTS,
    ),
    Mutant(
        "pages-in-files-mixed-up",
        "Files hold pages of one size.",
        _LAYOUT,
        '        return _digest(f"{self._token_format(ranks=1)}/{self.page_size}")\n',
        "        return _digest(self._token_format(ranks=1))\n",
        _LAYOUT_TESTS,
    ),
    Mutant(
        "ranks-not-counted",
        "Workers exchange KV if their ranks have equally many heads in all.",
        _LAYOUT,
        "        heads = self.num_kv_heads * ranks\n",
        "        heads = self.num_kv_heads\n",
        _LAYOUT_TESTS,
    ),
    Mutant(
        "budget-without-scales",
        "The budget counts the scales.",
        _LAYOUT,
        "        return self.num_layers * self.planes * self.heads * self.unit_bytes\n",
        "        unit = self.unit_bytes - 4 * (self.dtype is KvDType.INT8)\n"
        "        return self.num_layers * self.planes * self.heads * unit\n",
        _LAYOUT_TESTS,
    ),
    Mutant(
        "type-of-kv-ignored",
        "KV has the configured element type.",
        _LAYOUT,
        "    return KvDType(model.value) if configured is KvDType.AUTO else configured\n",
        "    return KvDType(model.value)\n",
        _LAYOUT_TESTS,
    ),
    Mutant(
        "written-past-the-codec",
        "The decoder writes in place only what the pool stores as it is.",
        "engine/decoder.py",
        "if kv_pool.in_place_dtype == qkv.dtype:",
        "if kv_pool.in_place_dtype is not None:",
        _MODEL_TESTS,
    ),
)
