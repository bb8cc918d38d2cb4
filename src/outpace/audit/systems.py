"""What can be audited: anything that continues a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..generator import Generator
from ..types import SamplingParams


class System(Protocol):
    """An engine under audit.

    Attributes:
        name: what it is, in a line.
        takes_seeds: whether a sample follows from its seed.
    """

    name: str
    takes_seeds: bool

    def sample(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[int]]:
        """One continuation per seed: token ids behind the prompt.

        Each has `params.max_new_tokens` tokens, or ends with an EOS token before.
        Seeds of their own make independent samples.
        """
        ...


class GeneratorSystem:
    """A generator of ours, with its drafter, K and verifier."""

    takes_seeds = True

    def __init__(self, generator: Generator, name: str = "") -> None:
        self.generator = generator
        engine = generator.engine
        drafter = engine.drafter
        drafted = f"drafter {drafter.name}, K = {engine.k}" if drafter else "plain decoding"
        self.name = name or f"outpace, {drafted}, verifier {engine.verifier.name}"

    def sample(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[int]]:
        prompts = [list(prompt)] * len(seeds)
        results = self.generator.generate(prompts, params=params, seed=list(seeds))
        return [list(result.token_ids) for result in results]
