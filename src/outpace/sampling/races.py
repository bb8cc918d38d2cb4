"""Races: every token draws an exponential time, and the fastest for its probability wins.

If E_i are independent Exp(1), argmin E_i / p_i has the law p (the exponential
race; in logarithms the Gumbel-max trick). Two laws that race with the same E
agree as often as their ratio allows: at least (1 - TV) / (1 + TV) of the time
(Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding", 2024, theorem 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from .noise import Stream, uniform_bits


@dataclass(frozen=True, slots=True)
class Keys:
    """What the races of B sequences are keyed by.

    Attributes:
        seeds: `[B]` int64, the bits of each request's unsigned seed.
        first: `[B]` int64, the position of each sequence's next token.
    """

    seeds: Tensor
    first: Tensor

    def select(self, rows: Tensor | slice) -> Keys:
        """The same for some of the sequences."""
        return Keys(self.seeds[rows], self.first[rows])


def exponentials(keys: Keys, depths: Tensor, vocab_size: int) -> Tensor:
    """Times `[B, T, V]` float64, Exp(1), of every token at these depths.

    Args:
        depths: `[B, T]` int64; 0 is each sequence's next token.
    """
    device = depths.device
    position = (keys.first.unsqueeze(1) + depths).unsqueeze(-1)  # [B, T, 1]
    token = torch.arange(vocab_size, device=device)
    stream = torch.full((), int(Stream.RACE), device=device)
    bits = uniform_bits(keys.seeds.view(-1, 1, 1), position, stream, token)
    return -torch.log1p(bits.double() * -(2.0**-53))


def race(p: Tensor, keys: Keys, depths: Tensor) -> Tensor:
    """The winners `[B, T]` int64 under p `[B, T, V]`; a token with p = 0 never wins.

    Args:
        depths: `[B, T]` int64, of the token that each row is for; 0 is each sequence's next.
    """
    if (library := kernels.loaded(p)) is not None:
        return kernels.race(library, p, keys.seeds, keys.first.unsqueeze(1) + depths)
    times = exponentials(keys, depths, p.shape[-1]) / p.double()
    return torch.where(p > 0, times, torch.inf).argmin(-1)
