"""From names to a generator: everything is checked before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .drafters import Blueprint, CascadeDrafter, Drafter, Setting, parse
from .drafters.base import check_looked_at
from .drafters.candidates import Candidate, blueprint, candidates
from .drafters.cascade import Cascade
from .engine import Engine
from .engine.checks import (
    AUTO,
    check_compatible,
    check_k,
    check_max_batch,
    check_max_len,
    check_request,
)
from .engine.pipeline import make_pipeline
from .errors import ContextLengthError, IncompatibleError, OptionError
from .generator import Generator, Messages, Prompt, encode, numbered
from .models.loading import (
    Compile,
    Progress,
    check_compile,
    check_runner,
    choose_device,
    choose_dtype,
    eos_token_ids,
    inspect_checkpoint,
    load_model,
    load_tokenizer,
)
from .models.quantize import choose_quantization
from .planner import PROMPTS, fit_tree
from .trees import Builder, SequoiaBuilder, TreeLike, parse_tree
from .types import SamplingParams
from .verifiers import make_verifier

_MEASURED = 64
"""Tokens of the texts that Sequoia's tree is measured on."""


def check_measurable(drafter: Blueprint) -> None:
    """Whether Sequoia's tree can be measured for a drafter.

    Raises:
        OptionError: it is several.
    """
    if isinstance(drafter, Cascade | CascadeDrafter):
        raise OptionError(
            f"Sequoia's tree is measured for one drafter, and {drafter.name} is several: "
            "give a shape, e.g. tree='4x2x1'"
        )


class Assembly:
    """A target, a drafter and how they run together: checked, not loaded yet.

    See `load` for the arguments and errors.

    Attributes:
        verifier: the rule that it will run by.
        source: the target's checkpoint.
        remarks: what the vocabulary check found worth showing.
    """

    def __init__(
        self,
        model: str | Path,
        drafter: str | Path | Drafter | None = AUTO,
        k: int | str | None = AUTO,
        *,
        verifier: str | None = None,
        tree: TreeLike | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_batch: int = 8,
        max_len: int | None = None,
        compile: Compile = "auto",
        quantize: str | None = None,
    ) -> None:
        check_k(k)
        self._check_free(drafter)
        self._k, self._max_batch = k, check_max_batch(max_batch)
        self._given_rule = None if verifier is None else make_verifier(verifier)
        self._tree: Builder | None = None
        self.remarks: list[str] = []
        self.candidates: Sequence[Candidate] = ()
        self._draft: Blueprint | None = None
        found = isinstance(drafter, str) and drafter == AUTO
        if not found:
            self._draft = _blueprint(drafter)
            self._join(tree)
        self._device = choose_device(device)
        self._dtype, self._compile, self._quantize = dtype, compile, quantize
        choose_dtype(dtype, None, self._device)
        quantization = choose_quantization(quantize)
        check_compile(compile, self._device)
        self.source = inspect_checkpoint(model)
        check_runner(self.source, self._device, compile, quantization)
        self._max_len = check_max_len(max_len, self.source.context_length)
        self.tokenizer = load_tokenizer(self.source)
        self._eos = eos_token_ids(self.source, self.tokenizer)
        if found:
            self._draft = self._find() if k != 0 else None
            self._join(tree)
        if isinstance(self._tree, SequoiaBuilder) and not self._tree.trees and self._k != 0:
            self._check_room(self._tree)
        if self._draft is not None:
            self.remarks += self.check_drafter(self._draft)

    def _find(self) -> Blueprint | None:
        """Who drafts where nobody was named: all that suit the model, the machine and the rule."""
        self.candidates = candidates(self.setting)
        return blueprint([c for c in self.candidates if self._goes(c)])

    def _goes(self, candidate: Candidate) -> bool:
        """Whether it is exact with the rule that was given, if one was."""
        if candidate.make is not None and self._given_rule is not None:
            try:
                check_compatible(candidate.make(), self._given_rule)
            except IncompatibleError:
                return False
        return True

    def _join(self, tree: TreeLike | None) -> None:
        """Shape and rule for the drafter."""
        if tree is not None:
            self._branch(tree)
        rule = Drafter.rule if self._draft is None else self._draft.rule
        self.verifier = self._given_rule or make_verifier(rule)
        if self._draft is not None:
            if self._k == AUTO:
                check_looked_at(self._draft)
            check_compatible(self._draft, self.verifier)
            if not self.verifier.lossless:
                self.remarks.append(
                    f"the verifier {self.verifier.name!r} is lossy: sampled text is not the "
                    "target's"
                )

    def _branch(self, tree: TreeLike) -> None:
        """Let the drafter draft trees, whose children come about as suits the rule."""
        if self._draft is None:
            raise OptionError("a tree is for a drafter, and there is none: give one, or no tree")
        rule = self._given_rule or make_verifier(self._draft.rule)
        self._tree = parse_tree(tree, rule.siblings)
        if isinstance(self._tree, SequoiaBuilder):
            check_measurable(self._draft)
        self._draft.branch(self._tree)

    def _check_room(self, builder: SequoiaBuilder) -> None:
        """Whether there is room to measure Sequoia's tree."""
        if self._max_len // 2 - 1 < min(builder.depth, _MEASURED):
            raise ContextLengthError(
                f"Sequoia's tree of depth {builder.depth} is measured on texts of more than "
                f"max_len={self._max_len} allows: raise it, or give a shape, e.g. tree='4x2x1'"
            )

    def _fit(self, engine: Engine, progress: Progress) -> None:
        """Measure on beginnings of texts, as far as there is room for them."""
        room = self._max_len // 2
        prompts = [self.tokenizer.encode(text)[:room] for text in PROMPTS]
        tokens = min(_MEASURED, room - 1)
        fit_tree(engine, prompts, tokens=tokens, tokenizer=self.tokenizer, progress=progress)

    @staticmethod
    def _check_free(drafter: object) -> None:
        if isinstance(drafter, Drafter):
            drafter.check_free()

    def check_drafter(self, drafter: Blueprint) -> Sequence[str]:
        """Whether a drafter could draft for this target; remarks worth showing.

        Raises:
            OutpaceError: it could not.
        """
        return drafter.check(self.setting)

    @property
    def setting(self) -> Setting:
        """What drafters are checked for."""
        return Setting(
            self.source,
            self.tokenizer,
            self._device,
            self._compile,
            self._quantize,
            self._dtype,
        )

    def check(
        self,
        params: SamplingParams,
        prompts: Prompt | Sequence[Prompt] | None = None,
        messages: Messages | Sequence[Messages] | None = None,
    ) -> None:
        """Whether requests would be taken.

        Raises:
            OutpaceError: what `Generator.generate` would raise.
        """
        ids, _, many = encode(self.tokenizer, prompts, messages)
        vocab_size, eos = self.source.vocab_size, params.ends(self._eos)
        for index, prompt in enumerate(ids):
            with numbered(index, many):
                check_request(prompt, params, vocab_size, self._max_len, self.verifier)
                make_pipeline(params, prompt, vocab_size, eos, self.tokenizer, torch.device("cpu"))

    def load(self, progress: Progress = lambda what, done, total: None) -> Generator:
        """Read the weights.

        Raises:
            CheckpointError, UnsupportedModelError: they cannot be read or run.
            CompilerError: `compile` is True, and the kernels cannot be compiled.
        """
        self._check_free(self._draft)
        target = load_model(
            self.source,
            self._dtype,
            self._device,
            progress,
            compile=self._compile,
            quantize=self._quantize,
        )
        proposer: Drafter | None = None
        if self._draft is not None and self._k != 0:
            proposer = self._draft.build(target, progress)
        generator = Generator(
            target,
            proposer,
            self._k,
            tokenizer=self.tokenizer,
            eos=self._eos,
            verifier=self._given_rule,
            max_batch=self._max_batch,
            max_len=self._max_len,
            remarks=self.remarks,
        )
        tree = self._tree
        if isinstance(tree, SequoiaBuilder) and not tree.trees and proposer is not None:
            self._fit(generator.engine, progress)
        return generator


def _blueprint(drafter: str | Path | Drafter | None) -> Blueprint | None:
    if isinstance(drafter, (str, Path)):
        return parse(drafter)
    if drafter is not None and not isinstance(drafter, Drafter):
        raise OptionError(
            f"drafter takes a name, a path or an outpace.drafters.Drafter, not {drafter!r}"
        )
    return drafter


def load(
    model: str | Path,
    drafter: str | Path | Drafter | None = AUTO,
    k: int | str | None = AUTO,
    *,
    verifier: str | None = None,
    tree: TreeLike | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    max_batch: int = 8,
    max_len: int | None = None,
    compile: Compile = "auto",
    quantize: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Generator:
    """Load a target and a drafter.

    Args:
        model: a checkpoint folder, a hub id, or "demo" (shipped).
        drafter: a name with its options ("ngram", "suffix:nodes=32"), a smaller
            checkpoint of the same vocabulary ("demo-draft" is shipped), or a drafter
            of one's own; None is plain decoding. `outpace drafters` lists them. "auto" takes
            all that suit the model and the machine, of which every round takes the one that
            pays best; `outpace drafters MODEL` says which these are.
        k: tokens drafted per round along the longest path: "auto" takes in every round
            what promises most tokens per second then, none at all included; a number is
            fixed, and 0 is plain decoding; None is a number that suits the drafter, or in a
            cascade each of its members.
        verifier: the rule for requests that sample: "token", the default for tokens
            that were drawn; "block", which accepts somewhat more of them; "match",
            the default for those that were not; "coupled", the default for requests with a
            seed, which then gives one text with any drafter and K, or none; "traversal", the
            default for trees that were drawn, "kseq" and "multipath", for trees; "greedy",
            which takes requests at temperature 0 only; or "typical", which is lossy: its texts
            are not the target's.
        tree: what a drafter that runs a model drafts, by default chains: children per
            node by level ("4x2x1"), "chains:3,5", "sequoia:32", "dynamic:48,6",
            "opt:48", paths of ranks ([[0], [0, 0], [1]]), or a file of them. `outpace
            tree` lists and draws them.
        dtype: "float32", "bfloat16" or "float16"; by default the checkpoint's
            where this machine is fast at it, else float32.
        device: "cpu", "cuda", "cuda:N" or "mps"; by default the best there is.
        max_batch: sequences that run at once.
        max_len: positions per sequence; by default the model's context.
        compile: run each pass of a Llama-family model as one call of C++,
            compiled for the machine on first use and kept, or on CUDA as one
            graph: True, False, or "auto", where that can be.
        quantize: keep the target's matrices in 8 or 4 bits: "int8" or "int4". That
            is another target, whose output is as exact as any's.
        progress: called with (what, done, total) while weights are read.

    Raises:
        OutpaceError: a subclass that names the cause and the fix; before any
            weight is read where that is possible.
    """
    assembly = Assembly(
        model,
        drafter,
        k,
        verifier=verifier,
        tree=tree,
        dtype=dtype,
        device=device,
        max_batch=max_batch,
        max_len=max_len,
        compile=compile,
        quantize=quantize,
    )
    return assembly.load(progress)
