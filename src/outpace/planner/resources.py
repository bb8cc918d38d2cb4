"""Memory and arithmetic that speculation takes, from a few numbers of either model's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import OptionError
from ..types import check_whole_number
from .formulas import check_tokens


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and arithmetic of a decoder follow from.

    Attributes:
        parameters: all of them, tied ones once.
        layers, heads, kv_heads, head_dim: of the attention.
        lookup: of the parameters those that are only looked up: an embedding that is
            not the output's, too.
        weight_bytes: per parameter.
        cache_bytes: per number in keys and values.

    Raises:
        OptionError: a number cannot be.
    """

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    lookup: int = 0
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "heads", "kv_heads", "head_dim"):
            check_whole_number(name, getattr(self, name), 1, "of a decoder")
        check_whole_number("lookup", self.lookup, 0, "0 where embeddings are tied")
        if self.lookup >= self.parameters:
            raise OptionError("all parameters are looked up: lookup counts the embedding alone")
        for name in ("weight_bytes", "cache_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} must be above 0, not {getattr(self, name)!r}")

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        return self.parameters * self.weight_bytes

    def cache(self, positions: int, batch: int = 1) -> float:
        """Bytes of keys and values.

        Args:
            positions: of each sequence.
        """
        check_whole_number("positions", positions, 0, "tokens of a sequence")
        check_whole_number("batch", batch, 1, "sequences in it")
        numbers = 2 * self.layers * self.kv_heads * self.head_dim
        return float(numbers * self.cache_bytes * positions * batch)

    def flops(self, context: float) -> float:
        """Of a forward pass per row: 2 per multiplied parameter, and attention to the context.

        Scores and sums take 2 each per head, dimension and position.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * context
        return 2.0 * (self.parameters - self.lookup) + attention


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, by what they are for. Activations and workspaces are not in it."""

    target_weights: float
    target_cache: float
    draft_weights: float
    draft_cache: float

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, f.name) for f in fields(self))

    @property
    def added(self) -> float:
        """What speculation adds to plain decoding's, over that."""
        return (self.draft_weights + self.draft_cache) / (self.target_weights + self.target_cache)


def memory(target: ModelShape, draft: ModelShape | None, positions: int, batch: int = 1) -> Memory:
    """Weights and caches of both models.

    Args:
        draft: None where nothing is loaded for drafting (n-grams, the target's own layers).
        positions: of each sequence, the K that a round holds beyond the text included.

    Raises:
        OptionError: positions or batch cannot be.
    """
    cache = target.cache(positions, batch)
    if draft is None:
        return Memory(target.weights, cache, 0.0, 0.0)
    return Memory(target.weights, cache, draft.weights, draft.cache(positions, batch))


def wasted_flops(tokens: float, k: int, target: float, draft: float) -> float:
    """FLOPs per round that went into tokens which were rejected, or stood behind one.

    K + 1 - E tokens on average, each with a row of the target's and a step of the draft's.

    Args:
        tokens: E, per round.
        target, draft: FLOPs per row and step, `ModelShape.flops`.

    Raises:
        OptionError: K is no length, or a round cannot emit so many.
    """
    check_tokens(tokens, k)
    return (k + 1 - tokens) * (target + draft)


def operations_ratio(tokens: float, k: int, ratio: float) -> float:
    """Arithmetic per emitted token over plain decoding's: (K ĉ + K + 1) / E.

    Leviathan et al., 2023, theorem 3.11, where E is that of equal chances. It is 1 at least:
    speculation buys time with arithmetic.

    Args:
        tokens: E, per round.
        ratio: ĉ, the draft's FLOPs per token ÷ the target's.

    Raises:
        OptionError: K is no length, a round cannot emit so many, or the ratio is negative.
    """
    check_tokens(tokens, k)
    if not 0 <= ratio < math.inf:
        raise OptionError(f"the ratio of operations must be 0 or more, not {ratio!r}")
    return (k * ratio + k + 1) / tokens
