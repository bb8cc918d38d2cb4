"""outpace: lossless speculative decoding for PyTorch.

import outpace
generator = outpace.load("demo", drafter="demo-draft", k=4)
print(generator.generate("def parse(").text)
"""

from .assembly import load
from .engine.stats import Stats
from .errors import (
    CheckpointError,
    ContextLengthError,
    DeadEndError,
    EndpointError,
    IncompatibleError,
    NumericsError,
    OptionError,
    OutpaceError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from .generator import Generator, Stream
from .types import Result, SamplingParams, TokenEvent

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ContextLengthError",
    "DeadEndError",
    "EndpointError",
    "Generator",
    "IncompatibleError",
    "NumericsError",
    "OptionError",
    "OutpaceError",
    "Result",
    "SamplingParams",
    "Stats",
    "Stream",
    "TokenEvent",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "__version__",
    "load",
]
