"""Runners, cache, weights, tokenizers, and the toy model."""

from .base import ForwardOutput, LanguageModel, prefill
from .cache import SlotCache
from .loading import inspect_checkpoint, load_model, load_tokenizer
from .markov import MarkovModel
from .tokenizer import Tokenizer

__all__ = [
    "ForwardOutput",
    "LanguageModel",
    "MarkovModel",
    "SlotCache",
    "Tokenizer",
    "inspect_checkpoint",
    "load_model",
    "load_tokenizer",
    "prefill",
]
