"""Pure probability: transforms, keyed noise, draws, residuals."""

from .draws import DraftNoise, argmax, categorical, law_device, residual, without
from .noise import RequestNoise, Stream, uniforms
from .races import Keys, exponentials, race
from .transforms import Pipeline, Prefixes, Transform
from .warp import Shaped, Warp

__all__ = [
    "DraftNoise",
    "Keys",
    "Pipeline",
    "Prefixes",
    "RequestNoise",
    "Shaped",
    "Stream",
    "Transform",
    "Warp",
    "argmax",
    "categorical",
    "exponentials",
    "law_device",
    "race",
    "residual",
    "uniforms",
    "without",
]
