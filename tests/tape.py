"""A recorder of passes that needs no GPU: every operator, run again on the same tensors."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _Tape(TorchDispatchMode):
    """Like a graph it knows operators and tensors, and nothing of what Python did between."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, out))
        return out

    def taken(self):
        """Addresses of what the calls take from outside."""
        made, found = set(), set()
        for _, args, kwargs, out in self.calls:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and not x.is_mkldnn and id(x) not in made:
                    found.add(x.untyped_storage().data_ptr())
            made |= {id(x) for x in tree_leaves(out)}
        return found

    def replay(self):
        made = {}

        def now(x):
            return made.get(id(x), x) if isinstance(x, Tensor) else x

        for operator, args, kwargs, before in self.calls:
            after = operator(*tree_map(now, args), **tree_map(now, kwargs))
            many = isinstance(before, (tuple, list))
            pairs = zip(before, after, strict=True) if many else [(before, after)]
            made |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}


class Recorder:
    """Counts what it records, and what is replayed.

    Args:
        forgets: a tape is not kept, only the addresses it took from outside, in `taken`.
    """

    def __init__(self, forgets=False):
        self.recorded = self.replayed = 0
        self.forgets, self.taken = forgets, set()

    def __call__(self, run):
        self.recorded += 1
        with _Tape() as tape:
            run()
        if self.forgets:
            self.taken |= tape.taken()
            return lambda: None

        def replay():
            self.replayed += 1
            tape.replay()

        return replay
