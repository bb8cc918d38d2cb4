"""Shared settings."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("outpace", deadline=None, derandomize=True)
settings.load_profile("outpace")
