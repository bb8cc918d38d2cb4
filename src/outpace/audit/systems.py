"""What can be audited: anything that continues a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..generator import Generator, Stream
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
    """A generator of ours, with its drafter, K and verifier.

    Args:
        seeded: whether samples are those of requests that ask for their seeds, which may be
            verified by a rule of their own, see `Engine`. By default they are those of
            requests that ask for none, though their noise is that of the seeds.
    """

    takes_seeds = True

    def __init__(self, generator: Generator, name: str = "", seeded: bool = False) -> None:
        self.generator, self.seeded = generator, seeded
        engine = generator.engine
        drafter, k = engine.drafter, "auto" if engine.auto else engine.k
        drafted = f"drafter {drafter.name}, K = {k}" if drafter else "plain decoding"
        self.name = name or f"outpace, {drafted}, verifier {engine.verifier.name}"

    def sample(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[int]]:
        generator, engine = self.generator, self.generator.engine
        requests = [
            engine.submit(
                prompt,
                replace(params, seed=seed if self.seeded else None),
                eos=generator.eos_token_ids,
                tokenizer=generator.tokenizer,
                noise=seed,
            )
            for seed in seeds
        ]
        with Stream(engine, requests, [None] * len(seeds), many=True) as stream:
            for _ in stream:
                pass
            return [list(result.token_ids) for result in stream.results]
