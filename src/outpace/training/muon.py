"""Muon: momentum whose step is the nearest semi-orthogonal matrix (Jordan et al., 2024).

`torch.optim.Muon` iterates in bf16 whatever the hardware, which a CPU without
bf16 instructions emulates: three times slower there than the whole rest of a
step. Here the precision is that of the parameters unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Odd quintic a·x + b·x³ + c·x⁵ that drives singular values in (0, 1] to about 1 (Jordan et al.).
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalised(matrix: Tensor, iterations: int = 5) -> Tensor:
    """A matrix `[m, n]` with the singular vectors of `matrix` and singular values near 1.

    Newton-Schulz iterations: matrix products only, in the matrix's own dtype.
    They do not converge to 1 but into about [0.7, 1.2], which trains as well.
    """
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, for 2-D parameters.

    A step's root mean square is 0.2 of the learning rate, like AdamW's, so
    both take similar rates (Liu et al., 2025, "Muon is scalable for LLM
    training"). Weight decay is decoupled.

    Args:
        dtype: of the iterations; None: that of each parameter.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, **group)

    def _move(
        self,
        parameter: Tensor,
        gradient: Tensor,
        lr: float,
        momentum: float,
        weight_decay: float,
        **_: Any,
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"].lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(average, momentum)
        direction = orthogonalised(ahead.to(self._dtype or ahead.dtype))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(direction, alpha=-lr * 0.2 * max(parameter.shape) ** 0.5)
