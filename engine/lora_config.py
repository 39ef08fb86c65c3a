"""A LoRA adapter's `adapter_config.json`, as peft writes it. Loads no torch.

What would change the answers and is not computed here is refused by the name of its field. So is a
field that is not known and says anything: it may be what an adapter of tomorrow needs.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.adapter_files import CONFIG_FILE
from kvferry.errors import ConfigError
from kvferry.limits import ADAPTER_RANK_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.adapter_files import AdapterFiles

_READ = frozenset({"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern"})
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "lora_dropout", "megatron_core", "runtime_config", "ensure_weight_tying"),
        # Which modules are adapted follows from the tensors.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # Of ways to begin or to quantize that are refused, or leave their trace in the tensors.
        *("eva_config", "corda_config", "loftq_config", "qalora_group_size", "lora_ga_config"),
    }
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "use_rslora": (True, False, None),
    # The others change the base model's weights, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""What each of these may say; any other field only that it is off."""
_OFF: tuple[object, ...] = (None, False, 0, "", [], {})
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Ranks and scales of an adapter's modules."""

    rank: int
    alpha: float
    rank_stabilised: bool
    """Scaled by alpha / sqrt(rank), not alpha / rank."""
    ranks: Mapping[str, int]
    """Of modules with a rank of their own: those whose name, or the end of it behind a point, is
    matched by this regular expression. The first one counts."""
    alphas: Mapping[str, float]
    """The same of alpha."""

    def rank_of(self, module: str) -> int:
        """By the module's full name in the model."""
        return self.ranks.get(_matching(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by."""
        alpha = self.alphas.get(_matching(self.alphas, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_lora_config(files: AdapterFiles) -> LoraConfig:
    """Raises `ConfigError` naming the adapter's setting, its text naming the field of the file."""
    try:
        values = json.loads(files.config)
    except (ValueError, RecursionError) as error:
        raise _refusal(files, f"is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise _refusal(files, "must contain a JSON object")
    if values.get("peft_type") != "LORA":
        raise _refusal(files, f"peft_type is {values.get('peft_type')!r}; must be LORA")
    for name, value in values.items():
        if name in _READ | _WITHOUT_EFFECT:
            continue
        if value not in _NEUTRAL.get(name, _OFF):
            raise _refusal(files, f"{name} is {value!r}, which is not supported")
    patterns = {
        name: _pattern(files, name, values.get(name) or {})
        for name in ("rank_pattern", "alpha_pattern")
    }
    return LoraConfig(
        rank=_rank(files, "r", values.get("r")),
        alpha=_number(files, "lora_alpha", values.get("lora_alpha")),
        rank_stabilised=bool(values.get("use_rslora")),
        ranks={
            key: _rank(files, f"rank_pattern[{key!r}]", value)
            for key, value in patterns["rank_pattern"].items()
        },
        alphas={
            key: _number(files, f"alpha_pattern[{key!r}]", value)
            for key, value in patterns["alpha_pattern"].items()
        },
    )


def _refusal(files: AdapterFiles, problem: str) -> ConfigError:
    return ConfigError(files.setting, f"{CONFIG_FILE}: {problem}")


def _rank(files: AdapterFiles, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(files, f"{name} is {value!r}; must be an integer above 0")
    if value > ADAPTER_RANK_MAX:
        raise _refusal(files, f"{name} is {value}; must be at most {ADAPTER_RANK_MAX}")
    return value


def _number(files: AdapterFiles, name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    raise _refusal(files, f"{name} is {value!r}; must be a finite number")


def _pattern(files: AdapterFiles, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(files, f"{name} is {value!r}; must be an object")
    for key in value:
        try:
            # By itself too: no bracket in it may close one of the expression's.
            re.compile(key)
            re.compile(_expression(key))
        except re.error as error:
            raise _refusal(files, f"{name}: {key!r} is no regular expression: {error}") from error
    return value


def _matching(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that matches; the name itself if none does."""
    found = (key for key in patterns if re.match(_expression(key), module))
    return next(found, module)


def _expression(key: str) -> str:
    return rf"(.*\.)?({key})$"
