"""From names to a generator: everything is checked before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .drafters import Drafter, ModelDrafter
from .engine.checks import (
    check_compatible,
    check_k,
    check_max_batch,
    check_max_len,
    check_request,
)
from .engine.pipeline import make_pipeline
from .generator import Generator, Messages, Prompt, encode, numbered
from .models.loading import (
    Compile,
    Progress,
    Source,
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
from .models.tokenizer import check_vocabularies
from .types import SamplingParams
from .verifiers import make_verifier


class Assembly:
    """A target, a drafter and how they run together: checked, not loaded yet.

    See `load` for the arguments and errors.

    Attributes:
        remarks: what the vocabulary check found worth showing.
    """

    def __init__(
        self,
        model: str | Path,
        drafter: str | Path | None = None,
        k: int = 4,
        *,
        verifier: str = "token",
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_batch: int = 8,
        max_len: int | None = None,
        compile: Compile = "auto",
        quantize: str | None = None,
    ) -> None:
        self._k, self._max_batch = check_k(k), check_max_batch(max_batch)
        self._rule = make_verifier(verifier)
        self.remarks: list[str] = []
        if drafter is not None:
            check_compatible(ModelDrafter, self._rule)
            if not self._rule.lossless:
                self.remarks.append(
                    f"the verifier {verifier!r} is lossy: sampled text is not the target's"
                )
        self._device = choose_device(device)
        self._dtype, self._compile, self._quantize = dtype, compile, quantize
        choose_dtype(dtype, None, self._device)
        quantization = choose_quantization(quantize)
        check_compile(compile, self._device)
        self._target = inspect_checkpoint(model)
        check_runner(self._target, self._device, compile, quantization)
        self._max_len = check_max_len(max_len, self._target.context_length)
        self.tokenizer = load_tokenizer(self._target)
        self._eos = eos_token_ids(self._target, self.tokenizer)
        self._draft: Source | None = None
        if drafter is not None:
            self._draft = inspect_checkpoint(drafter)
            check_runner(self._draft, self._device, compile, None)
            self.remarks += check_vocabularies(
                self.tokenizer, load_tokenizer(self._draft), self._draft.vocab_size
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
        vocab_size, eos = self._target.vocab_size, params.ends(self._eos)
        for index, prompt in enumerate(ids):
            with numbered(index, many):
                check_request(prompt, params, vocab_size, self._max_len, self._rule)
                make_pipeline(params, prompt, vocab_size, eos, self.tokenizer, torch.device("cpu"))

    def load(self, progress: Progress = lambda what, done, total: None) -> Generator:
        """Read the weights.

        Raises:
            CheckpointError, UnsupportedModelError: they cannot be read or run.
            CompilerError: `compile` is True, and the kernels cannot be compiled.
        """
        target = load_model(
            self._target,
            self._dtype,
            self._device,
            progress,
            compile=self._compile,
            quantize=self._quantize,
        )
        proposer: Drafter | None = None
        if self._draft is not None and self._k:
            # The draft runs as the target does; two precisions would only cost acceptance.
            draft = load_model(
                self._draft, target.dtype, target.device, progress, compile=self._compile
            )
            proposer = ModelDrafter(draft, target.vocab_size, self._draft.name)
        return Generator(
            target,
            proposer,
            self._k,
            tokenizer=self.tokenizer,
            eos=self._eos,
            verifier=self._rule,
            max_batch=self._max_batch,
            max_len=self._max_len,
            remarks=self.remarks,
        )


def load(
    model: str | Path,
    drafter: str | Path | None = None,
    k: int = 4,
    *,
    verifier: str = "token",
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
        drafter: a smaller checkpoint of the same vocabulary ("demo-draft" is
            shipped); None is plain decoding.
        k: tokens drafted per round; 0 is plain decoding.
        verifier: the rule for requests that sample: "token"; "block", which
            accepts somewhat more; "match", whose seeded texts are plain
            decoding's, token by token; "coupled", whose seeded texts depend on
            the target alone, too, and which accepts more than "match"; "greedy",
            which takes requests at temperature 0 only; or "typical", which is
            lossy: its texts are not the target's.
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
        dtype=dtype,
        device=device,
        max_batch=max_batch,
        max_len=max_len,
        compile=compile,
        quantize=quantize,
    )
    return assembly.load(progress)
