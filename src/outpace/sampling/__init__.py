"""Pure probability: transforms, keyed noise, draws, residuals."""

from .draws import categorical, residual, without
from .noise import RequestNoise, Stream, uniforms
from .transforms import Warp

__all__ = ["RequestNoise", "Stream", "Warp", "categorical", "residual", "uniforms", "without"]
