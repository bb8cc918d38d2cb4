"""What an engine and a request need to be sound, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..drafters import Blueprint, Drafter
from ..drafters.base import check_looked_at
from ..errors import ContextLengthError, IncompatibleError, OptionError
from ..types import Draft, Independent, Rows, SamplingParams, Shape, check_whole_number
from ..verifiers import Verifier, make_verifier

AUTO = "auto"
"""The K of every round is what promises most tokens per second then."""

_SHAPES = {
    Shape.CHAIN: "chains",
    Shape.PATHS: "paths of one length",
    Shape.TREE: "trees",
}


def choose_k(k: int | str | None, drafter: Drafter | None) -> tuple[int, bool]:
    """The longest path that is ever drafted, and whether every round takes its own.

    Raises:
        OptionError: there is no such K.
        IncompatibleError: the drafter cannot be chosen in every round anew.
    """
    k = check_k(k)
    if drafter is None:
        return 0, False
    if k is None:
        return drafter.k, False
    if isinstance(k, int):
        return k, False
    check_looked_at(drafter)
    return drafter.most, True


def check_k(k: int | str | None) -> int | str | None:
    """K as given: a number, "auto", or None for what the drafter takes by itself.

    Raises:
        OptionError: it is none of these.
    """
    if k is None or k == AUTO:
        return k
    return check_whole_number("k", k, 0, "0 is plain decoding, 'auto' follows what pays")


def check_max_batch(max_batch: int) -> int:
    """The number of slots as given.

    Raises:
        OptionError: not a whole number >= 1.
    """
    return check_whole_number("max_batch", max_batch, 1, "requests that run at once")


def check_max_len(max_len: int | None, context_length: int) -> int:
    """Positions per sequence, by default all the model has.

    Raises:
        OptionError: not a whole number >= 2.
        ContextLengthError: more than the model's context.
    """
    if max_len is None:
        return context_length
    max_len = check_whole_number("max_len", max_len, 2, "positions per sequence")
    if max_len > context_length:
        raise ContextLengthError(
            f"max_len={max_len} is more than the model's context of {context_length} positions"
        )
    return max_len


def check_compatible(drafter: Blueprint, verifier: Verifier) -> None:
    """Refuse a pair that would not be exact.

    Raises:
        IncompatibleError: the verifier does not take the drafter's law or shape.
    """
    taken = verifier.laws
    if drafter.proposes is Shape.CHAIN and Independent in taken:  # there are no siblings
        taken = (*taken, Rows)
    refused = [law.__name__ for law in drafter.laws if not issubclass(law, taken)]
    if refused:
        raise IncompatibleError(
            f"the verifier {verifier.name!r} is not exact for drafts of {drafter.name!r} "
            f"({', '.join(refused)}): choose another verifier"
        )
    if verifier.coupled and drafter.proposes > Shape.CHAIN and Independent in drafter.laws:
        raise IncompatibleError(
            f"with the verifier {verifier.name!r} all children of a node race with the same noise, "
            f"so {drafter.name!r} cannot draw them with replacement: draw them without it"
        )
    if drafter.proposes > verifier.takes:
        raise IncompatibleError(
            f"the drafter {drafter.name!r} proposes {_SHAPES[drafter.proposes]} and the verifier "
            f"{verifier.name!r} takes {_SHAPES[verifier.takes]} only: choose another verifier"
        )


def steady_rule(drafter: Blueprint | None) -> Verifier:
    """A rule whose texts follow from target and seed alone: 'coupled'.

    'match' for drafts that 'coupled' would not be exact for.
    """
    coupled = make_verifier("coupled")
    try:
        if drafter is not None:
            check_compatible(drafter, coupled)
    except IncompatibleError:
        return make_verifier("match")
    return coupled


def check_draft(draft: Draft, drafter: Drafter, budgets: Sequence[int], vocab_size: int) -> None:
    """Whether a draft is what its drafter may propose.

    Raises:
        IncompatibleError: another law or shape than it declares, a path that is too
            long, or ids that the target has not (seen on the CPU alone: elsewhere it would
            have to be waited for).
    """
    said = f"the drafter {drafter.name!r}"
    if not isinstance(draft.law, drafter.laws):
        raise IncompatibleError(
            f"{said} proposed by the law {type(draft.law).__name__}, which its laws do not name"
        )
    if (shape := max(tree.shape for tree in draft.trees)) > drafter.proposes:
        raise IncompatibleError(
            f"{said} proposed {_SHAPES[shape]}, and says that it proposes "
            f"{_SHAPES[drafter.proposes]} only"
        )
    for tree, budget in zip(draft.trees, budgets, strict=True):
        if tree.depth > budget:
            raise IncompatibleError(
                f"{said} proposed a path of {tree.depth} tokens where {budget} were allowed"
            )
    tokens = draft.tokens
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise IncompatibleError(
                f"{said} proposed token {low if low < 0 else high}, which is outside the target's "
                f"vocabulary of {vocab_size}"
            )


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    max_len: int,
    verifier: Verifier,
) -> None:
    """Whether a request can be run.

    Raises:
        OptionError: an empty prompt, or an id outside the vocabulary.
        IncompatibleError: the verifier does not fit the request.
        ContextLengthError: the prompt, or with `on_context_full="error"` prompt
            and new tokens, outgrow the context.
    """
    if not len(prompt):
        raise OptionError("the prompt is empty: give at least one token of text")
    for what, ids in (("token id", prompt), ("EOS token id", params.eos_token_ids or ())):
        bad = next((t for t in ids if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise OptionError(f"{what} {bad} is outside the target's vocabulary of {vocab_size}")
    if not params.greedy and not verifier.takes_sampling:
        raise IncompatibleError(
            f"the verifier {verifier.name!r} is exact at temperature 0 only: "
            "set temperature=0 or use verifier='token'"
        )
    room = max_len - len(prompt)
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the context {max_len}: "
            f"shorten the prompt to at most {max_len - 1}"
        )
    if params.on_context_full == "error" and params.max_new_tokens > room:
        raise ContextLengthError(
            f"{len(prompt)} prompt tokens and max_new_tokens={params.max_new_tokens} need "
            f"{len(prompt) + params.max_new_tokens} positions, the context has "
            f"{max_len}: ask for at most {room} or use on_context_full='stop'"
        )
