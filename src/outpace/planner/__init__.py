"""What is measured of a target and a drafter on this machine, and what follows from it."""

from .acceptance import Acceptance, measure_acceptance
from .costs import measure_costs
from .prompts import PROMPTS
from .trees import Fit, fit, fit_tree, one_round, promise

__all__ = [
    "PROMPTS",
    "Acceptance",
    "Fit",
    "fit",
    "fit_tree",
    "measure_acceptance",
    "measure_costs",
    "one_round",
    "promise",
]
