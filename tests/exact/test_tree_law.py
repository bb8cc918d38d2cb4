"""Rules for trees keep the target's law to 1e-12, on every ordered tree of up to 6 nodes.

It is shown in three steps. Readable twins (`tree_rules.py`) have the law: they are run once for
every way that draws and decisions can go, with tables of small whole weights, over 3 and 4
tokens. The kernels and the tensor code decide as their twins do, with noise just below and just
above each threshold. And on small trees the law of the rules themselves, taken as black boxes,
is enumerated from the noise alone.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broken_rules import WRONG_TREES, WRONG_TWINS
from outpace import kernels
from outpace.audit.enumeration import Drafted, round_law, worst_error
from outpace.errors import CompilerError
from outpace.sampling import categorical
from outpace.trees import chain
from outpace.types import Draft, Independent, PointMass, Rows, Shape, Tree
from outpace.verifiers import (
    BlockVerifier,
    GreedyVerifier,
    KSeqVerifier,
    MatchVerifier,
    MultiPathVerifier,
    Noise,
    TokenVerifier,
    TraversalVerifier,
)
from tree_rules import (
    Drawing,
    Fixed,
    KSeq,
    MultiPath,
    Recursive,
    Traversal,
    accepted,
    children,
    deviation,
    fixed,
    law_of,
    leaves,
    numbered,
    replaced,
    scaled,
    shapes,
    struck,
    table,
)

EXACT = 1e-12
NEAR = {torch.float64: 1e-9, torch.float32: 1e-6}
"""How near to a threshold noise is put. Where rows of floats are all but equal, what is left of
them is their rounding; nobody is held to that."""

TREES = [numbered(s, random.Random(i)) for n in range(7) for i, s in enumerate(shapes(n))]
PAIR, TWO_PATHS = Tree((-1, -1)), Tree((-1, -1, 0, 1))
SEEDS = st.integers(0, 2**32)
DRAWN = {"with": replaced, "without": struck, "certain": None}

CASES = [
    (Recursive, TokenVerifier, "with"),
    (Recursive, TokenVerifier, "without"),
    (Recursive, TokenVerifier, "certain"),
    (Traversal, TraversalVerifier, "with"),
    (Traversal, TraversalVerifier, "without"),
    (Traversal, TraversalVerifier, "certain"),
    (KSeq, KSeqVerifier, "with"),
    (Recursive, KSeqVerifier, "certain"),
    (MultiPath, MultiPathVerifier, "with"),
    (Traversal, MultiPathVerifier, "certain"),
    (Traversal, BlockVerifier, "without"),
    (Traversal, BlockVerifier, "certain"),
]
TWINS = dict.fromkeys((twin, drawn) for twin, _, drawn in CASES)


def even(tree: Tree) -> bool:
    """Paths from the root, all of one length."""
    ends = {d for i, d in enumerate(tree.depths) if i not in tree.parents}
    return tree.shape <= Shape.PATHS and len(ends) < 2


def trees_of(rule) -> list[Tree]:
    if rule in (MultiPath, MultiPathVerifier):
        return [tree for tree in TREES if even(tree)]
    return [t for t in TREES if t.shape <= getattr(rule, "takes", Shape.TREE)]


class Setting:
    """Tables of p and q for a tree, and how its nodes are drawn."""

    def __init__(self, tree: Tree, vocab: int, seed: str, drawn: str) -> None:
        self.tree, self.vocab = tree, vocab
        self.p = table(vocab, f"p {seed}")
        self.q = table(vocab, f"q {seed}")
        how = DRAWN[drawn]
        self.law = how(self.q) if how else fixed(vocab, seed)
        self.kind = {"with": Independent, "without": Rows, "certain": None}[drawn]

    def drawing(self, choose, said=None) -> Drawing:
        return Drawing(self.tree, self.p, self.law, choose, said)

    def fixed(self, choose) -> Fixed:
        """All tokens and rows."""
        draft, nodes = self.drawing(choose), range(len(self.tree))
        tokens = [draft.token(i) for i in nodes]
        rows = [draft.p(i) for i in (-1, *nodes)]
        return Fixed(self.tree, tokens, rows, [draft.q(i) for i in nodes])

    def emitted(self, rule, said=None):
        return law_of(rule, lambda choose: self.drawing(choose, said))

    def error(self, rule, said=None) -> float:
        return deviation(self.emitted(rule, said), self.p)


def settings_of(rule, vocab: int, seed: int, drawn: str) -> list[Setting]:
    return [Setting(t, vocab, f"{seed} {t.parents}", drawn) for t in trees_of(rule)]


# --- the twins have the law ----------------------------------------------------------------------


@pytest.mark.parametrize(("twin", "drawn"), TWINS)
@pytest.mark.parametrize("vocab", [3, 4])
@settings(max_examples=2)
@given(seed=SEEDS)
def test_twins_keep_the_law_on_every_tree(twin, drawn, vocab, seed):
    assert max(s.error(twin()) for s in settings_of(twin, vocab, seed, drawn)) < EXACT


@pytest.mark.parametrize("wrong", WRONG_TWINS)
def test_broken_twins_are_caught(wrong):
    assert max(s.error(wrong()) for s in settings_of(MultiPath, 3, 0, "with")) > 1e-2


@pytest.mark.parametrize("twin", [Recursive, Traversal])
def test_rows_that_do_not_lack_the_elder_siblings_are_caught(twin):
    """Drawn without replacement, reported as drawn with it."""
    some = settings_of(twin, 3, 0, "without")
    assert max(s.error(twin(), replaced(s.q)) for s in some if len(s.tree) < 5) > 1e-2


def test_lengths_of_paths_that_do_not_follow_from_their_tokens_are_caught():
    assert Setting(Tree((-1, 0, -1)), 3, "2", "with").error(MultiPath()) > 1e-2


# --- the rules decide as their twins -------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def library():
    try:
        return kernels.load_library()
    except CompilerError:
        return None


def put_near(twin, draft: Fixed, source: random.Random, near: float):
    """Acceptance noise near the thresholds that are met, and what the twin says with it."""
    accept = [source.random() for _ in draft.tokens]

    def passes(node: int, threshold: float) -> bool:
        sides = [u for u in (threshold - near, threshold + near) if 0 <= u <= 1 - near]
        accept[node] = source.choice([*sides, source.random()])
        return accept[node] < threshold

    return accept, twin.run(draft, passes)


def batch_of(some: list[Setting], dtype, source: random.Random):
    """A ragged batch: p, draft, and each sequence in lists, its rows as they are in the dtype."""

    def choose(row):
        return source.choices(range(len(row)), row)[0]

    drafts = [s.fixed(choose) for s in some]
    nodes, vocab = max(len(s.tree) for s in some), some[0].vocab
    p = torch.full((len(some), nodes + 1, vocab), 1 / vocab, dtype=dtype)
    q, tokens = p[:, 1:].clone(), torch.zeros(len(some), nodes, dtype=torch.int64)
    for b, draft in enumerate(drafts):
        n = len(draft.tree)
        p[b, : n + 1] = torch.tensor(draft.p_rows, dtype=dtype)
        draft.p_rows = p[b, : n + 1].tolist()
        if n:
            tokens[b, :n] = torch.tensor(draft.tokens)
            q[b, :n] = torch.tensor(draft.q_rows, dtype=dtype)
            draft.q_rows = q[b, :n].tolist()
    law = some[0].kind(q) if some[0].kind else PointMass()
    return p, Draft(tokens, law, tuple(s.tree for s in some)), drafts


def emitted(verdict, draft: Draft, b: int) -> tuple[list[int], int]:
    return verdict.path[b, : verdict.accepted[b]].tolist(), int(verdict.token[b])


def differing(twin, rule, p, draft, drafts, source) -> int:
    """Of how many sequences a rule says something else than its twin."""
    nodes = draft.tokens.shape[1]
    near = [put_near(twin, d, source, NEAR[p.dtype]) for d in drafts]
    accept = torch.tensor([a + [0.0] * (nodes - len(a)) for a, _ in near], dtype=torch.float64)
    target = torch.tensor([[source.random() for _ in range(nodes + 1)] for _ in drafts]).double()
    verdict, found = rule(p, draft, Noise(accept, target)), 0
    for b, (_, (path, row)) in enumerate(near):
        weights = torch.tensor(row, dtype=torch.float64)
        token = int(categorical(weights, target[b, len(path)]))
        found += emitted(verdict, draft, b) != (path, token)
    return found


@pytest.mark.parametrize(("twin", "rule", "drawn"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "tensors"])
@settings(max_examples=3)
@given(seed=SEEDS)
def test_rules_decide_as_their_twins_on_both_sides_of_every_threshold(
    twin, rule, drawn, dtype, seed
):
    source = random.Random(seed)
    some = settings_of(rule, source.choice([3, 4]), seed, drawn)
    p, draft, drafts = batch_of(some, dtype, source)
    for _ in range(3):
        assert differing(twin(), rule(), p, draft, drafts, source) == 0


@pytest.mark.parametrize(
    ("twin", "rule"), [(Recursive, TraversalVerifier), (Traversal, TokenVerifier)]
)
def test_another_rule_would_be_noticed(twin, rule):
    source = random.Random(0)
    batch = batch_of(settings_of(rule, 3, 0, "without"), torch.float64, source)
    assert differing(twin(), rule(), *batch, source) > 10


# --- the rules have the law, as black boxes ------------------------------------------------------


def drafted(s: Setting) -> list[Drafted]:
    """Every draft."""
    found = list(leaves(lambda chooser: s.fixed(chooser.choose)))
    n, count = len(s.tree), len(found)
    q = torch.tensor([d.q_rows for _, d in found], dtype=torch.float64).view(count, n, s.vocab)
    return [
        Drafted(
            torch.tensor([mass for mass, _ in found], dtype=torch.float64),
            torch.tensor([d.tokens for _, d in found], dtype=torch.int64).view(count, n),
            q if s.kind else None,
            torch.tensor([d.p_rows for _, d in found], dtype=torch.float64),
            s.tree,
        )
    ]


def error(rule, s: Setting) -> float:
    return off(round_law(rule, drafted(s)), s)


def off(law, s: Setting) -> float:
    longest = s.tree.depth + 1
    return worst_error(law, lambda t: torch.tensor(s.p(t), dtype=torch.float64), longest)


@pytest.mark.parametrize(
    ("rule", "drawn"),
    [*dict.fromkeys((rule, drawn) for _, rule, drawn in CASES), (MatchVerifier, "without")],
)
@settings(max_examples=2)
@given(seed=SEEDS)
def test_rules_keep_the_law_on_small_trees(rule, drawn, seed):
    for tree in trees_of(rule):
        if len(tree) < 4:
            assert error(rule(), Setting(tree, 3, f"{seed}", drawn)) < EXACT


@pytest.mark.parametrize("wrong", [*WRONG_TREES, *WRONG_TWINS])
def test_broken_rules_are_caught_on_small_trees(wrong):
    some = [Setting(t, 3, seed, "with") for t in (PAIR, TWO_PATHS) for seed in "012"]
    assert max(error(wrong(), s) for s in some) > 1e-2


def paths_that_end(s: Setting, ends) -> list[Drafted]:
    """Drafts of paths that end behind texts that have an end."""
    found: dict[Tree, list[tuple[float, Fixed]]] = {}
    for mass, draft in leaves(lambda chooser: s.fixed(chooser.choose)):
        at, kept, parents = {-1: (-1, ())}, list[int](), list[int]()
        for node, parent in enumerate(s.tree.parents):
            if parent in at and not (parent >= 0 and ends(at[parent][1])):
                new, text = at[parent]
                at[node] = len(kept), (*text, draft.tokens[node])
                parents.append(new)
                kept.append(node)
        rows = [draft.p_rows[i + 1] for i in (-1, *kept)]
        cut = Fixed(s.tree, [draft.tokens[i] for i in kept], rows, [draft.q_rows[i] for i in kept])
        found.setdefault(Tree(tuple(parents)), []).append((mass, cut))
    return [
        Drafted(
            torch.tensor([mass for mass, _ in some], dtype=torch.float64),
            torch.tensor([d.tokens for _, d in some]),
            torch.tensor([d.q_rows for _, d in some], dtype=torch.float64),
            torch.tensor([d.p_rows for _, d in some], dtype=torch.float64),
            tree,
        )
        for tree, some in found.items()
    ]


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_paths_may_end_by_their_own_tokens(seed):
    s = Setting(Tree((-1, 0, -1, 2)), 3, f"{seed}", "with")
    drafts = paths_that_end(s, lambda text: text[-1] == 1)
    assert len(drafts) > 2
    assert off(round_law(MultiPathVerifier(), drafts), s) < EXACT


# --- how much is accepted ------------------------------------------------------------------------


def branches_late(tree: Tree) -> bool:
    """Whether below the root a sibling that is not the eldest has children."""
    families = [children(tree, node) for node in range(len(tree))]
    return any(families[younger] for family in families for younger in family[1:])


@pytest.mark.parametrize("drawn", DRAWN)
def test_traversal_accepts_as_much_as_recursive_rejection_or_more(drawn):
    """But for trees that branch late: there it is so of most, not of all."""
    gains, exceptions = [], 0
    for seed in range(4):
        for s in settings_of(Traversal, 3, seed, drawn):
            one, other = (accepted(s.emitted(rule())) for rule in (Recursive, Traversal))
            gains.append(other - one)
            assert other > one - EXACT or branches_late(s.tree)
            exceptions += other < one - EXACT
    assert exceptions < len(gains) / 20
    if drawn != "certain":
        assert sum(gains) / len(gains) > 0.02


def test_two_children_drawn_in_three_ways():
    """p = (1/3, 2/3) and q = (2/3, 1/3)."""
    s = Setting(Tree((-1, -1)), 2, "", "with")
    s.p, s.q = lambda text: scaled([1, 2]), lambda text: scaled([2, 1])
    found = []
    for rule, how in ((Recursive, replaced), (KSeq, replaced), (Recursive, struck)):
        s.law = how(s.q)
        assert s.error(rule()) < EXACT
        found.append(accepted(s.emitted(rule())))
    assert found == sorted(set(found))


def expected(tree: Tree, rule, seed: str, near: bool = False) -> float:
    s = Setting(tree, 3, seed, "with")
    if near:
        s.law = replaced(s.p)
    return accepted(s.emitted(rule()))


@pytest.mark.parametrize(("paths", "length"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_several_paths_accept_more_than_one_unless_the_draft_is_near(paths, length):
    """Of the paths the one that the target wants most is taken, which is no gain where p = q."""
    parents = [p for k in range(paths) for p in (-1, *range(k * length, (k + 1) * length - 1))]
    one, several = (chain(length), Traversal), (Tree(tuple(parents)), MultiPath)
    gains = [expected(*several, f"{i}") - expected(*one, f"{i}") for i in range(30)]
    assert sum(gains) / len(gains) > 0.02
    assert expected(*one, "0", near=True) == pytest.approx(length, abs=EXACT)
    assert expected(*several, "0", near=True) < length - 1e-2


# --- edges ---------------------------------------------------------------------------------------


RULES = [(rule, drawn) for _, rule, drawn in CASES]


def texts(verdict, draft: Draft, p) -> list[list[tuple[int, int, int]]]:
    """Of each sequence: itself, the row behind which a token is emitted, the token."""
    found = []
    for b in range(len(p)):
        path, token = emitted(verdict, draft, b)
        said = [*(int(draft.tokens[b, node]) for node in path), token]
        rows = [0, *(node + 1 for node in path)]
        found.append([(b, r, x) for r, x in zip(rows, said, strict=True)])
    return found


def alike_behind_one_text(p, tokens, draft: Draft) -> None:
    """Give nodes with the same text the same row of the target, as models do."""
    for b, tree in enumerate(draft.trees):
        first: dict[tuple[int, ...], int] = {}
        said: dict[int, tuple[int, ...]] = {-1: ()}
        for node, parent in enumerate(tree.parents):
            said[node] = (*said[parent], int(tokens[b, node]))
            p[b, node + 1] = p[b, first.setdefault(said[node], node) + 1]


@pytest.mark.parametrize(("rule", "drawn"), RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_impossible_is_emitted_at_zero_noise(rule, drawn, dtype):
    source, generator = random.Random(0), torch.Generator().manual_seed(0)
    for seed in range(5):
        p, draft, _ = batch_of(settings_of(rule, 4, seed, drawn), dtype, source)
        zeros = torch.zeros(p.shape[:2], dtype=torch.float64)
        others = torch.randint(4, draft.tokens.shape, generator=generator)
        for tokens in (draft.tokens, others):
            alike_behind_one_text(p, tokens, draft)
            given_ = Draft(tokens, draft.law, draft.trees)
            verdict = rule()(p, given_, Noise(zeros[:, 1:], zeros))
            assert all(p[at] > 0 for said in texts(verdict, given_, p) for at in said)


@pytest.mark.parametrize(("rule", "drawn"), RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_draft_and_target_are_one_all_of_a_path_is_kept(rule, drawn, dtype):
    source = random.Random(0)
    some = settings_of(rule, 3, 1, drawn)
    for s in some:
        s.q = s.p
        s.law = DRAWN[drawn](s.p) if DRAWN[drawn] else s.law
    p, draft, _ = batch_of(some, dtype, source)
    noise = [torch.rand(len(p), n, dtype=torch.float64) for n in (p.shape[1] - 1, p.shape[1])]
    for law in (draft.law, PointMass()):
        verdict = rule()(p, Draft(draft.tokens, law, draft.trees), Noise(*noise))
        said = texts(verdict, draft, p)
        assert all(p[at] > 0 for of_one in said for at in of_one)
    if drawn != "certain":
        verdict = rule()(p, draft, Noise(*noise))
        whole = [t.is_chain for t in draft.trees]
        assert all(
            kept == len(t)
            for kept, t in zip(verdict.accepted, draft.trees, strict=True)
            if t.is_chain
        )
        assert sum(whole) > 3 or rule is not TokenVerifier


@pytest.mark.parametrize(("rule", "drawn"), RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rule_is_the_greedy_one_at_temperature_zero(rule, drawn, dtype):
    """Of paths that begin alike, the choice may take one that goes further."""
    source = random.Random(0)
    for seed in range(5):
        p, draft, _ = batch_of(settings_of(rule, 3, seed, drawn), dtype, source)
        p = torch.nn.functional.one_hot(p.argmax(-1), 3).to(dtype)
        noise = [torch.rand(len(p), n, dtype=torch.float64) for n in (p.shape[1] - 1, p.shape[1])]
        verdict, greedy = (r(p, draft, Noise(*noise)) for r in (rule(), GreedyVerifier()))
        assert all(p[at] == 1 for said in texts(verdict, draft, p) for at in said)
        if rule is MultiPathVerifier:
            assert (verdict.accepted >= greedy.accepted).all()
        else:
            assert torch.equal(verdict.path, greedy.path)
