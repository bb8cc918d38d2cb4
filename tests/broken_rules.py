"""Rules and drafters that real systems shipped or nearly shipped, each wrong in one place.

They are negative controls: the tests that pass the sound rule must catch every one.
"""

from __future__ import annotations

import torch

from outpace.sampling import categorical
from outpace.types import Rows
from outpace.verifiers import BlockVerifier, MatchVerifier, TokenVerifier, Verdict
from tree_rules import KSeq, MultiPath, Traversal, overlap, without


class _Variant(TokenVerifier):
    """Token verification with its three ingredients open to sabotage."""

    def ratio(self, u, px, qx):
        return (u * qx < px) & (qx > 0)

    def rest(self, p, q):
        return (p - q).clamp_min(0)

    def draw(self, row, u_target, u_accept):
        return categorical(row, u_target)

    def __call__(self, p, draft, noise):
        batch, n = draft.tokens.shape
        b = torch.arange(batch)
        px = p[:, :n].gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
        if isinstance(draft.law, Rows):
            q = draft.law.q
        else:
            q = torch.nn.functional.one_hot(draft.tokens, p.shape[-1]).to(p.dtype)
        qx = q.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
        kept = self.ratio(noise.accept, px, qx)
        accepted = kept.cumprod(1).sum(1)
        q = torch.cat([q, torch.zeros_like(p[:, :1])], 1)
        row = self.rest(p[b, accepted], q[b, accepted])
        u_accept = torch.cat([noise.accept, noise.target[:, :1]], 1)[b, accepted]
        token = self.draw(row, noise.target[b, accepted], u_accept)
        nodes = torch.arange(n)
        return Verdict(torch.where(nodes < accepted.unsqueeze(1), nodes, -1), accepted, token)


class Sound(_Variant):
    """Nothing is broken: the twin itself passes."""


class AcceptsImpossible(_Variant):
    """`u <= p/q`: a token with p = 0 passes when u = 0."""

    def ratio(self, u, px, qx):
        return u * qx <= px


class NoResidual(_Variant):
    """After a rejection, draws from p instead of the residual."""

    def rest(self, p, q):
        return p


class NotRenormalised(_Variant):
    """Inverts (p - q)+ without renormalising: the missing mass falls on the last token."""

    def draw(self, row, u_target, u_accept):
        return (row.cumsum(-1) <= u_target.unsqueeze(-1)).sum(-1).clamp_max(row.shape[-1] - 1)


class SharedNoise(_Variant):
    """The residual is drawn with the uniform that decided the rejection."""

    def draw(self, row, u_target, u_accept):
        return categorical(row, u_accept)


class InvertedRatio(_Variant):
    """min(1, q/p)."""

    def ratio(self, u, px, qx):
        return (u * px < qx) & (px > 0)


class WrongRowResidual(_Variant):
    """The residual is taken against the next position's q."""

    def __call__(self, p, draft, noise):
        verdict = super().__call__(p, draft, noise)
        if not isinstance(draft.law, Rows) or draft.tokens.shape[1] < 2:
            return verdict
        b = torch.arange(len(p))
        shifted = torch.cat([draft.law.q[:, 1:], draft.law.q[:, :1]], 1)
        at = verdict.accepted.clamp_max(draft.tokens.shape[1] - 1)
        rest = (p[b, verdict.accepted] - shifted[b, at]).clamp_min(0) + 1e-300
        full = verdict.accepted == draft.tokens.shape[1]
        token = torch.where(full, verdict.token, categorical(rest, noise.target[:, 0]))
        return Verdict(verdict.path, verdict.accepted, token)


class NaNAtZeroMass(_Variant):
    """Divides by the residual's mass without looking: NaN where p = q."""

    def rest(self, p, q):
        rest = (p - q).clamp_min(0)
        return rest / rest.sum(-1, keepdim=True)


class SoundBlock(BlockVerifier):
    """Block verification, one sequence and one token at a time, open to sabotage."""

    stops = False

    def weight(self, joint):
        return joint

    def step(self, joint, ratio):
        return min(1.0, joint * ratio)

    def judged(self, p, q, joint):
        """h of an inner prefix."""
        left = sum(max(0.0, joint * a - b) for a, b in zip(p, q, strict=True))
        whole = left + 1 - joint
        return left / whole if whole > 0 else 1.0

    def one(self, p, q, tokens, accept, target):
        joint, weight, kept = 1.0, 1.0, 0
        for i, x in enumerate(tokens):
            joint = self.step(joint, p[i][x] / q[i][x] if q[i][x] > 0 else 0.0)
            last = i == len(tokens) - 1
            if accept[i] < (joint if last else self.judged(p[i + 1], q[i + 1], joint)):
                kept, weight = i + 1, self.weight(joint)
            elif self.stops:
                break
        rest = list(p[kept])
        if kept < len(tokens):
            rest = [max(0.0, weight * a - b) for a, b in zip(rest, q[kept], strict=True)]
        row = torch.tensor(rest if any(rest) else p[kept], dtype=torch.float64)
        return kept, int(categorical(row, torch.tensor(target[kept], dtype=torch.float64)))

    def __call__(self, p, draft, noise):
        if isinstance(draft.law, Rows):
            q = draft.law.q
        else:
            q = torch.nn.functional.one_hot(draft.tokens, p.shape[-1])
        n = draft.tokens.shape[1]
        ends = [
            self.one(
                *(x[b].tolist() for x in (p, q)),
                draft.tokens[b, : len(t)].tolist(),
                noise.accept[b].tolist(),
                noise.target[b].tolist(),
            )
            for b, t in enumerate(draft.trees)
        ]
        return Verdict.of([range(k) for k, _ in ends], n, torch.tensor([t for _, t in ends]))


class StopsAtTheFirst(SoundBlock):
    """Goes no further behind a prefix that fails, as in token verification."""

    stops = True


class ForgetsTheWeight(SoundBlock):
    """The residual of token verification: (p - q)+ without the joint ratio."""

    def weight(self, joint):
        return 1.0


class Unclamped(SoundBlock):
    """The joint ratio may exceed 1."""

    def step(self, joint, ratio):
        return joint * ratio


class JudgesByRatio(SoundBlock):
    """Inner prefixes pass with the joint ratio itself."""

    def judged(self, p, q, joint):
        return joint


WRONG_BLOCKS = [StopsAtTheFirst, ForgetsTheWeight, Unclamped, JudgesByRatio]
WRONG_LAW = [NoResidual, NotRenormalised, InvertedRatio, WrongRowResidual]


class SoundTree(TokenVerifier):
    """Token verification of trees in lists, open to sabotage."""

    def left(self, p, q, x):
        """What a rejected child leaves, normalised."""
        rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        return [a / sum(rest) for a in rest] if any(rest) else p

    def one(self, p, q, tokens, tree, accept, target):
        path, row = [], p[0]
        for node, parent in enumerate(tree.parents):
            if parent == (path[-1] if path else -1):
                x = tokens[node]
                if q[node][x] > 0 and accept[node] * q[node][x] < row[x]:
                    path.append(node)
                    row = p[node + 1]
                else:
                    row = self.left(row, q[node], x)
        u = torch.tensor(target[len(path)], dtype=torch.float64)
        return path, int(categorical(torch.tensor(row, dtype=torch.float64), u))

    def __call__(self, p, draft, noise):
        if isinstance(draft.law, Rows):
            q = draft.law.q
        else:
            q = torch.nn.functional.one_hot(draft.tokens, p.shape[-1])
        given = zip(p, q, draft.tokens, draft.trees, noise.accept, noise.target, strict=True)
        ends = [
            self.one(a.tolist(), b.tolist(), t.tolist(), tree, u.tolist(), v.tolist())
            for a, b, t, tree, u, v in given
        ]
        tokens = torch.tensor([t for _, t in ends])
        return Verdict.of([path for path, _ in ends], draft.tokens.shape[1], tokens)


class ForgetsTheRejected(SoundTree):
    """Every child is held against p itself."""

    def left(self, p, q, x):
        return p


class StrikesOut(SoundTree):
    """A rejected child is struck out though it was drawn."""

    def left(self, p, q, x):
        rest = [0.0 if i == x else a for i, a in enumerate(p)]
        return [a / sum(rest) for a in rest] if any(rest) else p


class LeavesUnnormalised(SoundTree):
    """What a rejection leaves is taken for a law as it is."""

    def left(self, p, q, x):
        return [max(0.0, a - b) for a, b in zip(p, q, strict=True)]


class TakesTheNextRow(SoundTree):
    """Every node is held against the row behind the next one."""

    def __call__(self, p, draft, noise):
        return super().__call__(p.roll(-1, 1), draft, noise)


class MatchesTheNextRow(MatchVerifier):
    """The same, of the rule that matches."""

    def __call__(self, p, draft, noise):
        return super().__call__(p.roll(-1, 1), draft, noise)


WRONG_TREES = [ForgetsTheRejected, StrikesOut, LeavesUnnormalised]


class TraversalByShare(Traversal):
    """A node's weights keep the mass S / Σq, as in a public port."""

    def mass(self, rest, q, before):
        return min(sum(rest) / sum(q), 1.0), sum(q)


class TraversalOfP(Traversal):
    """A node's weights after a failure are normalised: its mass is what it was."""

    def mass(self, rest, q, before):
        return before, sum(rest) / before


class KSeqOfRatioOne(KSeq):
    """All children are held against p with ρ = 1, as if there were one."""

    def rho(self, p, q, draws):
        return 1.0


class KSeqWithoutFactor(KSeq):
    """What is left is p - min(q, p/ρ), as if one child had failed."""

    def rest(self, p, q, rho, draws):
        return without(p, overlap(p, q, rho))


class MultiPathOfPlainRows(MultiPath):
    """The chosen path is verified as if it had been the only one."""

    skew = False


WRONG_TWINS = [
    TraversalByShare,
    TraversalOfP,
    KSeqOfRatioOne,
    KSeqWithoutFactor,
    MultiPathOfPlainRows,
]
