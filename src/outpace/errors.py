"""Every error that outpace raises on purpose, under one root.

A message is one line that names the cause and the fix. Errors about what a
caller passed in derive from `ValueError` too, so ordinary handlers see them.
"""

from __future__ import annotations


class OutpaceError(Exception):
    """Root of all errors raised by outpace."""


class OptionError(OutpaceError, ValueError):
    """An argument, flag or field has a value that cannot work."""


class CheckpointError(OutpaceError):
    """A checkpoint is missing, incomplete, corrupt, or of an unsupported kind."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is readable, but no runner can run it exactly."""


class CompilerError(OutpaceError):
    """The kernels cannot be compiled on this machine."""


class VocabularyMismatchError(OutpaceError, ValueError):
    """Target and draft disagree about what a token id means."""


class ContextLengthError(OutpaceError, ValueError):
    """A request needs more positions than the model or the cache has."""


class DeadEndError(OutpaceError, ValueError):
    """A request's constraint and transforms leave no token to go on with."""


class NumericsError(OutpaceError, ArithmeticError):
    """A model's logits are not numbers."""


class EndpointError(OutpaceError):
    """A server does not answer, or not in a way that can be audited."""


class IncompatibleError(OutpaceError, ValueError):
    """Two parts were put together that would not keep the target's law."""


def first_line(error: BaseException) -> str:
    """The first line of somebody else's message, for ours to quote."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0]
