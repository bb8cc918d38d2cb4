"""The law to compare with: plain scoring, one row at a time, by the target alone.

Nothing of a speculative round is used: no block, no tree, no rule, no draft. A
text is fed token by token, and the law before each of its tokens follows from
that row and from what stands before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.pipeline import make_pipeline
from ..errors import ContextLengthError
from ..models.base import LanguageModel, prefill
from ..models.cache import SlotCache
from ..models.tokenizer import Tokenizer
from ..sampling import Warp, law_device
from ..types import SamplingParams

SLOTS = 8
"""Texts that are scored at once."""


class PlainScorer:
    """What a model says of texts, token by token.

    Args:
        eos: ids that end a request, where the parameters do not say.
        tokenizer: for parameters that speak of text.
        vocab_size: V, by default the model's: ids it lacks have probability 0,
            ids beyond are cut off.
    """

    def __init__(
        self,
        model: LanguageModel,
        eos: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.model, self.eos, self.tokenizer = model, tuple(eos), tokenizer
        self.vocab_size = vocab_size or model.vocab_size

    def fits(self, prompts: Sequence[Sequence[int]], length: int) -> bool:
        """Whether the model's context holds so many tokens behind each prompt."""
        return all(len(p) + length - 1 <= self.model.context_length for p in prompts)

    def eos_of(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids that end a request with these parameters."""
        return params.ends(self.eos)

    def may_end(self, prompt: Sequence[int], text: Sequence[int], params: SamplingParams) -> bool:
        """Whether a constraint allows nothing more behind a text."""
        read, device = list(prompt), torch.device("cpu")
        eos = self.eos_of(params)
        pipeline = make_pipeline(params, read, self.vocab_size, eos, self.tokenizer, device)
        if pipeline is None:
            return False
        read += text
        return None in pipeline(torch.zeros(1, self.vocab_size), [()])[1].values()

    def laws(
        self, prompt: Sequence[int], texts: Sequence[Sequence[int]], params: SamplingParams
    ) -> Iterator[Tensor]:
        """For each text the law before each of its tokens `[len(text), V]`, on the CPU.

        Zeros where no token is left, and behind that.
        """
        for logits in self.logits(prompt, texts, params):
            yield self._law(logits, params)

    def rows_behind(
        self, prompt: Sequence[int], texts: Sequence[Sequence[int]], params: SamplingParams
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each text logits and law `[V]` of the token behind it, as above."""
        for logits in self.logits(prompt, [(*text, 0) for text in texts], params):
            yield logits[-1].clone(), self._law(logits[-1:], params)[0]

    def _law(self, logits: Tensor, params: SamplingParams) -> Tensor:
        library = getattr(self.model, "library", None)
        warp = Warp([params], self.vocab_size, law_device(self.model.device), library)
        some = ~torch.isneginf(logits).all(-1)
        law = torch.zeros_like(logits)
        if some.any():
            law[some] = warp(logits[some].unsqueeze(0))[0].to(law.dtype)
        return law.cpu()

    def logits(
        self, prompt: Sequence[int], texts: Sequence[Sequence[int]], params: SamplingParams
    ) -> Iterator[Tensor]:
        """For each text the logits `[len(text), V]` behind all transforms, before temperature.

        -inf where no token is left, and behind that.

        Raises:
            ContextLengthError: a text is longer than the model's context.
        """
        longest = max(map(len, texts), default=0)
        if not self.fits([prompt], longest):
            raise ContextLengthError(
                f"{len(prompt)} prompt tokens and {longest} more need {len(prompt) + longest - 1} "
                f"positions, the scoring model has {self.model.context_length}: use shorter ones"
            )
        most = self.model.vocab_size - 1
        read = [min(token, most) for token in prompt[:-1]]
        cache = self.model.new_cache(SLOTS, len(prompt) + longest)
        for slot in range(min(SLOTS, len(texts))):
            prefill(self.model, cache, slot, read)
        for start in range(0, len(texts), SLOTS):
            some = texts[start : start + SLOTS]
            yield from self._together(prompt, some, params, cache)
            for slot in range(len(some)):
                cache.truncate(slot, len(prompt) - 1)

    @torch.inference_mode()
    def _together(
        self,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        params: SamplingParams,
        cache: SlotCache,
    ) -> list[Tensor]:
        device = law_device(self.model.device)
        read = [list(prompt) for _ in texts]
        pipelines = [
            make_pipeline(params, r, self.vocab_size, self.eos_of(params), self.tokenizer, device)
            for r in read
        ]
        found: list[list[Tensor]] = [[] for _ in texts]
        ended = [False] * len(texts)
        for depth in range(max(map(len, texts))):
            live = [i for i, text in enumerate(texts) if depth < len(text)]
            tokens = [[min(read[i][-1], self.model.vocab_size - 1)] for i in live]
            positions = [[len(read[i]) - 1] for i in live]
            out = self.model.forward(torch.tensor(tokens), torch.tensor(positions), cache, live)
            assert out.logits is not None
            logits = self._widened(out.logits.to(device))  # [B, 1, V]
            for row, i in enumerate(live):
                cache.commit(i, (0,))
                shaped, pipeline = logits[row], pipelines[i]
                if pipeline is not None and not ended[i]:
                    shaped, stuck = pipeline(shaped, [()])
                    ended[i] = 0 in stuck
                if ended[i]:
                    shaped = torch.full_like(shaped, -torch.inf)
                found[i].append(shaped[0].clone())
                read[i].append(texts[i][depth])
        return [torch.stack(rows) if rows else torch.empty(0, self.vocab_size) for rows in found]

    def _widened(self, logits: Tensor) -> Tensor:
        """Logits of the wanted vocabulary."""
        lacking = self.vocab_size - logits.shape[-1]
        logits = logits[..., : self.vocab_size]
        return F.pad(logits, (0, lacking), value=-torch.inf) if lacking > 0 else logits
