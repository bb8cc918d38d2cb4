"""transformers' `generate` under audit, by itself or assisted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import OptionError
from ..models.loading import Source
from ..types import SamplingParams, check_whole_number

_UNKNOWN = ("presence_penalty", "frequency_penalty", "json_schema", "regex", "grammar", "stop")
"""Parameters that `generate` has no equal of."""


class TransformersSystem:
    """`model.generate` with one kind of assistance, or none. One text at a time.

    Args:
        model: a causal LM.
        assistant: a draft model.
        prompt_lookup: tokens that n-grams of the prompt propose per round.
        early_exit: layers of the model's own that draft.
        k: tokens that an assistant or early exit drafts per round, constantly.
        eos: ids that end a text where the parameters do not say.
    """

    takes_seeds = False

    def __init__(
        self,
        model: Any,
        *,
        assistant: Any = None,
        prompt_lookup: int | None = None,
        early_exit: int | None = None,
        k: int = 4,
        eos: Sequence[int] = (),
    ) -> None:
        import transformers

        given = {
            "assistant_model": assistant,
            "prompt_lookup_num_tokens": prompt_lookup,
            "assistant_early_exit": early_exit,
        }
        if (assistant is not None or early_exit is not None) and k < 1:
            raise OptionError("k must be at least 1: with 0 nothing is drafted")
        self._assistance = {name: value for name, value in given.items() if value is not None}
        if len(self._assistance) > 1:
            raise OptionError(f"{' and '.join(self._assistance)} exclude each other: give one")
        if prompt_lookup is not None:
            check_whole_number("prompt_lookup", prompt_lookup, 1, "tokens per round")
        if early_exit is not None:
            check_early_exit(early_exit, model.config)
        self._model, self._eos = model, tuple(eos)
        # While it samples: not the checkpoint's own sampling, and a constant K.
        drafts = transformers.GenerationConfig()
        drafts.num_assistant_tokens, drafts.num_assistant_tokens_schedule = k, "constant"
        drafts.assistant_confidence_threshold = 0.0
        self._configs = [(one, drafts) for one in (model, assistant) if one is not None]
        how = ", ".join(
            name if name == "assistant_model" else f"{name}={value}"
            for name, value in self._assistance.items()
        )
        self.name = f"transformers {transformers.__version__} generate, {how or 'plain'}"

    def sample(
        self, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[int]]:
        options = generate_options(params, self._eos)
        ids = torch.tensor([list(prompt)], device=self._model.device)
        before = [one.generation_config for one, _ in self._configs]
        for one, config in self._configs:
            one.generation_config = config
        try:
            return self._texts(ids, options, seeds)
        finally:
            for (one, _), config in zip(self._configs, before, strict=True):
                one.generation_config = config

    def _texts(
        self, ids: torch.Tensor, options: dict[str, Any], seeds: Sequence[int]
    ) -> list[list[int]]:
        texts = []
        with torch.random.fork_rng(), torch.inference_mode():
            for seed in seeds:
                torch.manual_seed(seed)
                mask = torch.ones_like(ids)
                out = self._model.generate(ids, attention_mask=mask, **options, **self._assistance)
                texts.append(out[0, ids.shape[1] :].tolist())
        return texts


def check_early_exit(layers: int, config: Any) -> None:
    """So many layers of a model with a transformers config as its drafter.

    Raises:
        OptionError: it has no more.
    """
    check_whole_number("early_exit", layers, 1, "layers that draft")
    all_ = config.get_text_config(decoder=True).num_hidden_layers
    if layers >= all_:
        raise OptionError(f"early_exit={layers} must be less than the target's {all_} layers")


def generate_options(params: SamplingParams, eos: Sequence[int]) -> dict[str, Any]:
    """Sampling parameters as `generate` calls them, everything else switched off.

    Raises:
        OptionError: there is no equal.
    """
    given = params.given
    refused = [name for name in _UNKNOWN if name in given]
    refused += ["bad_words of text"] * any(isinstance(w, str) for w in params.bad_words)
    if refused:
        raise OptionError(f"transformers' generate has no {', '.join(refused)}: leave it out")
    ends = list(params.ends(eos))
    options: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "do_sample": not params.greedy,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
        "repetition_penalty": params.repetition_penalty,
        "no_repeat_ngram_size": params.no_repeat_ngram or 0,
    }
    if not params.greedy:
        options |= {
            "temperature": float(params.temperature),
            "top_k": params.top_k or 0,
            "top_p": params.top_p,
            "min_p": params.min_p or None,
        }
    words = [list(word) for word in params.bad_words]
    # As bad words EOS tokens would be let through.
    bias = params.logit_bias + tuple((w[0], -math.inf) for w in words if len(w) == 1)
    if bias:
        options["sequence_bias"] = {(i,): x for i, x in bias}
    if longer := [w for w in words if len(w) > 1]:
        options["bad_words_ids"] = longer
    if params.min_new_tokens and ends:
        options["min_new_tokens"] = params.min_new_tokens
    if params.transforms:
        options["logits_processor"] = list(params.transforms)
    return options


def load_causal_lm(source: Source, dtype: torch.dtype, device: torch.device) -> Any:
    """The checkpoint as transformers runs it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype)
    return model.to(device).eval()
