"""What is measured of a target and a drafter on this machine, and what follows from it."""

from .acceptance import Acceptance, measure_acceptance
from .alphas import (
    acceptance_rate,
    alpha_for,
    alpha_iid,
    alpha_of_rate,
    alpha_of_rows,
    alphas_of,
    match_alpha_of_rows,
)
from .costs import measure_costs
from .formulas import (
    Counted,
    tokens_block,
    tokens_by_depth,
    tokens_counted,
    tokens_iid,
    tokens_over_texts,
)
from .intervals import Interval, interval
from .prices import (
    DraftTime,
    PassTime,
    Price,
    RoundTimes,
    best_k,
    break_even,
    break_even_any,
    constant_price,
    most_speedup,
    speedup,
    speedup_iid,
    step_by_step,
)
from .prompts import PROMPTS
from .resources import Memory, ModelShape, memory, operations_ratio, wasted_flops
from .trees import Fit, fit, fit_tree, one_round, promise

__all__ = [
    "PROMPTS",
    "Acceptance",
    "Counted",
    "DraftTime",
    "Fit",
    "Interval",
    "Memory",
    "ModelShape",
    "PassTime",
    "Price",
    "RoundTimes",
    "acceptance_rate",
    "alpha_for",
    "alpha_iid",
    "alpha_of_rate",
    "alpha_of_rows",
    "alphas_of",
    "best_k",
    "break_even",
    "break_even_any",
    "constant_price",
    "fit",
    "fit_tree",
    "interval",
    "match_alpha_of_rows",
    "measure_acceptance",
    "measure_costs",
    "memory",
    "most_speedup",
    "one_round",
    "operations_ratio",
    "promise",
    "speedup",
    "speedup_iid",
    "step_by_step",
    "tokens_block",
    "tokens_by_depth",
    "tokens_counted",
    "tokens_iid",
    "tokens_over_texts",
    "wasted_flops",
]
