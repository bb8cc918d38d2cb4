"""Is an engine's output the target's? Exact, statistical and greedy audits, of ours and others."""

from .endpoint import EndpointSystem
from .exact import audit_rounds
from .greedy import audit_greedy
from .hf import TransformersSystem
from .report import Report
from .run import MODES, audit, scorers
from .sampled import audit_samples
from .scoring import PlainScorer
from .systems import GeneratorSystem, System

__all__ = [
    "MODES",
    "EndpointSystem",
    "GeneratorSystem",
    "PlainScorer",
    "Report",
    "System",
    "TransformersSystem",
    "audit",
    "audit_greedy",
    "audit_rounds",
    "audit_samples",
    "scorers",
]
