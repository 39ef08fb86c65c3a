"""Bugs of how KV is stored, moved and read back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_POOL = "mem_cache/paged_pool.py"
_CODEC = "mem_cache/element_codec.py"
_LAYOUT = "mem_cache/layout.py"
_POOL_TESTS = ("tests/contract/test_kv_pools.py", "tests/unit/mem_cache/test_mha_pool.py")
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
        "        first = (slots - within) * heads + within\n"
        "        return (first[:, None] + torch.arange(heads, device=slots.device) * page_size)"
        ".view(-1)\n",
        "        first = slots * heads + 0 * within\n"
        "        return (first[:, None] + torch.arange(heads, device=slots.device)).view(-1)\n",
        _POOL_TESTS,
    ),
    Mutant(
        "layers-from-the-first",
        "A payload of some layers is of those layers.",
        _POOL,
        "table = self._runs[layer_start:layer_stop].view(-1, words)",
        "table = self._runs[: layer_stop - layer_start].view(-1, words)",
        _POOL_TESTS,
    ),
    Mutant(
        "planes-on-top-of-one-another",
        "K and V of a slot are different memory.",
        _POOL,
        "within = self._run_index(slots.to(table.device))\n"
        "        return table, (first[:, None] + within).view(-1)",
        "within = self._run_index(slots.to(table.device))\n"
        "        return table, (first[:, None] // planes + within).view(-1)",
        _POOL_TESTS,
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
        "        return _digest(self._token_format(ranks))\n",
        '        return _digest(f"{self._token_format(ranks)}/{self.page_size}")\n',
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
        "engine/llama.py",
        "if kv_pool.in_place_dtype == qkv.dtype:",
        "if kv_pool.in_place_dtype is not None:",
        _MODEL_TESTS,
    ),
)
