"""What a layer does to each token by itself: a gated MLP, or a mixture of experts that are such.

Of several ranks each has some columns of every MLP, experts included: what `forward` returns is a
rank's summand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

import torch

from engine.layer_spec import Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.lora import AdapterRows
    from engine.operators.interface import Operators
    from engine.projection import Projection


class Mlp(Protocol):
    """One layer's, with its weights."""

    def forward(
        self, operators: Operators, inputs: torch.Tensor, adapted: Sequence[AdapterRows] = ()
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], a new tensor. `adapted`: see `Projection.apply`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """Implements `Mlp`: down (act(gate x) * up x), gate and up being one product."""

    gate_up: Projection
    down: Projection
    activation: Activation

    def forward(
        self, operators: Operators, inputs: torch.Tensor, adapted: Sequence[AdapterRows] = ()
    ) -> torch.Tensor:
        """See `Mlp.forward`."""
        gate_up = self.gate_up.apply(operators, inputs, adapted)
        match self.activation:
            case Activation.SILU:
                gated = operators.silu_and_mul(gate_up)
            case Activation.GELU_TANH:
                gated = operators.gelu_tanh_and_mul(gate_up)
            case _:
                assert_never(self.activation)
        return self.down.apply(operators, gated, adapted)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """An expert that every token goes through; `gate` [1, hidden] says how much of it counts."""

    mlp: GatedMlp
    gate: Projection

    def forward(self, operators: Operators, inputs: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        share = torch.sigmoid(self.gate.apply(operators, inputs))
        return self.mlp.forward(operators, inputs).mul_(share)


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """Implements `Mlp`: each token goes through the `per_token` experts that the router likes best.

    Tokens are sorted by expert, so that an expert's are one product. Experts have no adapters
    (`engine.lora_weights`).
    """

    router: Projection
    experts: Sequence[GatedMlp]
    per_token: int
    normalised: bool
    shared: SharedExpert | None

    def forward(
        self, operators: Operators, inputs: torch.Tensor, adapted: Sequence[AdapterRows] = ()
    ) -> torch.Tensor:
        """See `Mlp.forward`."""
        chosen, shares = self._route(operators, inputs)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens = order // self.per_token
        sorted_inputs, sorted_shares = inputs[tokens], shares.flatten()[order, None]
        out = torch.zeros_like(inputs)
        start = 0
        for expert, count in enumerate(flat.bincount(minlength=len(self.experts)).tolist()):
            if count:
                rows = slice(start, start + count)
                answer = self.experts[expert].forward(operators, sorted_inputs[rows])
                out.index_add_(0, tokens[rows], answer.mul_(sorted_shares[rows]))
                start += count
        return out if self.shared is None else out.add_(self.shared.forward(operators, inputs))

    def _route(
        self, operators: Operators, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each token int64 [T, per_token], and the shares of their answers."""
        scores = self.router.apply(operators, inputs).float().softmax(dim=-1)
        shares, chosen = scores.topk(self.per_token, dim=-1)
        if self.normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares.to(inputs.dtype)
