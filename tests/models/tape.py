"""A recorder of passes that needs no GPU: every operator, run again on the same tensors."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class _Tape(TorchDispatchMode):
    """Like a graph it knows operators and tensors, and nothing of what Python did between."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, out))
        return out

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
    """Counts what it records, and what is replayed."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, run):
        self.recorded += 1
        with _Tape() as tape:
            run()

        def replay():
            self.replayed += 1
            tape.replay()

        return replay
