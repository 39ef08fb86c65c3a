"""LoRA adapters as read from their files, checked against the model, and cut for a rank.

Of several ranks each has B's rows of its part of what goes out of a module that is cut by rows, and
A whole; of a module that is cut by columns it has A's columns of its part of the input, and B
whole, so that what it adds is a summand as its product is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from engine.lora import Expansion, LowRankUpdate
from engine.lora_config import read_lora_config
from engine.lora_kernels import warm_up
from kvferry.adapter_files import WEIGHTS_FILE, read_adapter
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.lora_config import LoraConfig
    from engine.model_spec import ModelSpec
    from engine.tensor_parallel import Shard
    from kvferry.adapter_files import AdapterFiles
    from kvferry.ids import AdapterId

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedModule:
    """Of the whole model."""

    down: torch.Tensor
    """A [rank, in]."""
    up: torch.Tensor
    """B [out, rank], with the scale in it."""


class LoraAdapters:
    """The adapters of a worker."""

    def __init__(
        self, modules: Mapping[AdapterId, Mapping[str, AdaptedModule]] | None = None
    ) -> None:
        """`modules`: of each adapter, by their names in the model. None: there are no adapters."""
        self._modules = {} if modules is None else dict(modules)

    @property
    def ids(self) -> frozenset[AdapterId]:
        """Of all of them."""
        return frozenset(self._modules)

    def inward(
        self, names: Sequence[str], rows: Sequence[int], shard: Shard
    ) -> dict[AdapterId, LowRankUpdate]:
        """Of a rank's product of modules side by side, `rows` of each."""
        found = (
            (adapter, _side_by_side([modules.get(name) for name in names], rows, shard))
            for adapter, modules in self._modules.items()
        )
        return {adapter: update for adapter, update in found if update is not None}

    def outward(self, name: str, shard: Shard) -> dict[AdapterId, LowRankUpdate]:
        """Of a rank's summand of what a module gives."""
        updates: dict[AdapterId, LowRankUpdate] = {}
        for adapter, modules in self._modules.items():
            module = modules.get(name)
            if module is not None:
                down = module.down[:, shard.of(module.down.shape[1])].contiguous()
                whole = slice(0, len(module.up))
                part = Expansion(slice(0, len(down)), whole, module.up.T)
                updates[adapter] = LowRankUpdate(down, [part])
        return updates


NO_ADAPTERS = LoraAdapters()


def load_adapters(
    directories: Mapping[str, str], spec: ModelSpec, dtype: torch.dtype, device: str = "cpu"
) -> LoraAdapters:
    """Read adapters of the model that `spec` describes, by their names.

    Raises `ConfigError` naming `model.adapters.NAME` for what cannot be computed, or not with this
    model.
    """
    loaded: dict[AdapterId, Mapping[str, AdaptedModule]] = {}
    for name, directory in directories.items():
        files = read_adapter(name, directory)
        if files.identity not in loaded:
            loaded[files.identity] = _read_modules(files, spec, dtype, device)
    if loaded and dtype == torch.float32 and device == "cpu":
        warm_up()
    return LoraAdapters(loaded)


def module_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(out, in) of the modules that may be adapted, of the whole model.

    Not those of experts and their routers: tokens come to them in another order. Nor embeddings
    and head.
    """
    hidden, wide = spec.hidden_size, spec.num_heads * spec.head_dim
    kv, mlp = spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    of_attention = {"q": (wide, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, wide)}
    of_mlp = {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}
    mixtures = () if spec.experts is None else spec.experts.layers
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        for part, shape in of_attention.items():
            shapes[f"{prefix}.self_attn.{part}_proj"] = shape
        if layer not in mixtures:
            for part, shape in of_mlp.items():
                shapes[f"{prefix}.mlp.{part}_proj"] = shape
    return shapes


def _side_by_side(
    modules: Sequence[AdaptedModule | None], rows: Sequence[int], shard: Shard
) -> LowRankUpdate | None:
    downs: list[torch.Tensor] = []
    expansions: list[Expansion] = []
    rank = column = 0
    for module, count in zip(modules, rows, strict=True):
        if module is not None:
            up = module.up[shard.of(len(module.up))]
            ranks = slice(rank, rank + len(module.down))
            expansions.append(Expansion(ranks, slice(column, column + count), up.T))
            downs.append(module.down)
            rank = ranks.stop
        column += count
    return LowRankUpdate(torch.cat(downs), expansions) if downs else None


def _read_modules(
    files: AdapterFiles, spec: ModelSpec, dtype: torch.dtype, device: str
) -> dict[str, AdaptedModule]:
    config = read_lora_config(files)
    try:
        tensors = load_tensors(files.weights)
    except (SafetensorError, KeyError) as error:
        raise _refusal(files, f"cannot be read: {error}") from error
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or tensor.dtype not in _DTYPES:
            raise _refusal(files, f"{name!r}, of {tensor.dtype}, is not supported")
        pairs.setdefault(match["module"], {})[match["part"]] = tensor
    if not pairs:
        raise _refusal(files, "has no tensors")
    shapes = module_shapes(spec)
    modules: dict[str, AdaptedModule] = {}
    for module, pair in pairs.items():
        _check(files, config, module, pair, shapes)
        up = pair["B"].float() * config.scale_of(module)
        adapted = AdaptedModule(pair["A"].to(device, dtype), up.to(device, dtype))
        if not (adapted.down.isfinite().all() and adapted.up.isfinite().all()):
            raise _refusal(files, f"what it adds to {module!r} is not finite in {dtype}")
        modules[module] = adapted
    return modules


def _check(
    files: AdapterFiles,
    config: LoraConfig,
    module: str,
    pair: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, int]],
) -> None:
    if module not in shapes:
        kinds = "q, k, v and o_proj of attention and gate, up and down_proj of an MLP"
        problem = f"adapts {module!r}; supported are those that the model has of {kinds}"
        raise _refusal(files, problem)
    for part, other in ("AB", "BA"):
        if part not in pair:
            raise _refusal(files, f"has lora_{other} of {module!r}, but no lora_{part}")
    rank, (rows, columns) = config.rank_of(module), shapes[module]
    for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
        found = tuple(pair[part].shape)
        if found != shape:
            problem = f"lora_{part} of {module!r} has shape {found}; it must have {shape}"
            raise _refusal(files, problem)


def _refusal(files: AdapterFiles, problem: str) -> ConfigError:
    return ConfigError(files.setting, f"{WEIGHTS_FILE}: {problem}")
