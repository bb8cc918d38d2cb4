"""Pure probability: transforms, keyed noise, draws, residuals."""

from .draws import argmax, categorical, law_device, residual, without
from .noise import RequestNoise, Stream, uniforms
from .transforms import Warp

__all__ = [
    "RequestNoise",
    "Stream",
    "Warp",
    "argmax",
    "categorical",
    "law_device",
    "residual",
    "uniforms",
    "without",
]
