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
from .drafting import Added, measure_drafting
from .formulas import (
    Counted,
    tokens_block,
    tokens_by_depth,
    tokens_counted,
    tokens_iid,
    tokens_over_texts,
)
from .intervals import Interval, interval
from .landscape import landscape, picture
from .machine import Machine, measure_machine
from .measuring import Surveying, Wanted, measure
from .plan import Advice, Option, Plan, plan
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
from .reasons import reasons
from .resources import Memory, ModelShape, memory, operations_ratio, wasted_flops
from .survey import Survey, Text, run_texts
from .terminal import terminal
from .trees import Fit, fit, fit_tree, one_round, promise

__all__ = [
    "PROMPTS",
    "Acceptance",
    "Added",
    "Advice",
    "Counted",
    "DraftTime",
    "Fit",
    "Interval",
    "Machine",
    "Memory",
    "ModelShape",
    "Option",
    "PassTime",
    "Plan",
    "Price",
    "RoundTimes",
    "Survey",
    "Surveying",
    "Text",
    "Wanted",
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
    "landscape",
    "match_alpha_of_rows",
    "measure",
    "measure_acceptance",
    "measure_costs",
    "measure_drafting",
    "measure_machine",
    "memory",
    "most_speedup",
    "one_round",
    "operations_ratio",
    "picture",
    "plan",
    "promise",
    "reasons",
    "run_texts",
    "speedup",
    "speedup_iid",
    "step_by_step",
    "terminal",
    "tokens_block",
    "tokens_by_depth",
    "tokens_counted",
    "tokens_iid",
    "tokens_over_texts",
    "wasted_flops",
]
