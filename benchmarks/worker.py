"""One engine in a process of its own, for `peers.py`; it needs no package but the engine's.

Reads its settings from the command line and then, line by line, `{"ids", "temperature", "seed"}`;
answers each with `{"tokens", "seconds"}`. All is JSON, batch 1, and no end-of-text token ends a
text. Seconds are those of the call that generates, prefill included.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
Run = Callable[[list[int], float, int], list[int]]
"""Token ids of a prompt, temperature and seed to the ids that were generated."""


def outpace(s: Settings) -> Run:
    from outpace import load

    options = {"dtype": s["dtype"], "verifier": s["verifier"], "max_batch": 1}
    generator = load(s["target"], s["draft"], s["k"], **options)

    def run(ids: list[int], temperature: float, seed: int) -> list[int]:
        return generator.generate(
            ids,
            temperature=temperature,
            seed=seed,
            max_new_tokens=s["tokens"],
            eos_token_ids=(),
        ).token_ids

    return run


def transformers(s: Settings) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(s["threads"])

    def load(folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, s["dtype"]))
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.eval()

    target = load(s["target"])
    options: dict[str, Any] = {}
    if s["draft"]:
        options["assistant_model"] = draft = load(s["draft"])
        if s["k"]:
            draft.generation_config.num_assistant_tokens = s["k"]
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0

    def run(ids: list[int], temperature: float, seed: int) -> list[int]:
        torch.manual_seed(seed)
        x = torch.tensor([ids])
        sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
        out = target.generate(
            input_ids=x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=s["tokens"],
            do_sample=bool(temperature),
            **sampling,
            **options,
        )
        return [int(t) for t in out[0, len(ids) :]]

    return run


def vllm(s: Settings) -> Run:
    from vllm import LLM, SamplingParams

    speculative = {
        "method": "draft_model",
        "model": s["draft"],
        "num_speculative_tokens": s["k"],
    }
    engine = LLM(
        model=s["target"],
        dtype=s["dtype"],
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=speculative if s["draft"] else None,
    )

    def run(ids: list[int], temperature: float, seed: int) -> list[int]:
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=s["tokens"], ignore_eos=True
        )
        (out,) = engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        return list(out.outputs[0].token_ids)

    return run


def onnx(s: Settings) -> Run:
    import onnxruntime_genai as og

    target, draft = _converted(s, _to_onnx, "onnx")
    if draft is not None:
        folder = Path(s["scratch"]) / "onnx-pair"
        shutil.copytree(target, folder, dirs_exist_ok=True)
        shutil.copytree(draft, folder / "draft", dirs_exist_ok=True)
        config = json.loads((target / "genai_config.json").read_text())
        decoder = json.loads((draft / "genai_config.json").read_text())["model"]["decoder"]
        config["model"]["draft"] = decoder | {"filename": "draft/" + decoder["filename"]}
        (folder / "genai_config.json").write_text(json.dumps(config))
        target = folder
    config = og.Config(str(target))
    config.overlay(
        json.dumps(
            {
                "model": {
                    "decoder": {"session_options": {"intra_op_num_threads": s["threads"]}},
                }
            }
        )
    )
    model = og.Model(config)

    def run(ids: list[int], temperature: float, seed: int) -> list[int]:
        params = og.GeneratorParams(model)
        length = len(ids) + s["tokens"]
        params.set_search_options(max_length=length, min_length=length, do_sample=temperature > 0)
        if temperature:
            params.set_search_options(
                temperature=temperature, top_k=0, top_p=1.0, random_seed=seed + 1
            )
        if draft is not None:
            params.set_speculative_options(max_draft_tokens=s["k"])
        generator = og.Generator(model, params)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        return [int(t) for t in generator.get_sequence(0)[len(ids) :]]

    return run


def _to_onnx(s: Settings, source: str, out: Path) -> list[str]:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    return [*builder, "-i", source, "-o", str(out), "-p", "fp32", "-e", "cpu", "-c", s["scratch"]]


def openvino(s: Settings) -> Run:
    import numpy
    import openvino
    import openvino_genai as og

    target, draft = _converted(s, _to_openvino, "openvino")
    scheduler = og.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    threads = {"INFERENCE_NUM_THREADS": s["threads"]}
    options: dict[str, Any] = threads | {"scheduler_config": scheduler}
    if draft is not None:
        options["draft_model"] = og.draft_model(str(draft), "CPU", **threads)
    pipeline = og.LLMPipeline(str(target), "CPU", **options)

    def run(ids: list[int], temperature: float, seed: int) -> list[int]:
        config = og.GenerationConfig()
        config.max_new_tokens = s["tokens"]
        config.ignore_eos = True
        config.apply_chat_template = False
        config.do_sample = temperature > 0
        if temperature:
            config.temperature, config.rng_seed = temperature, seed
            config.top_k, config.top_p = 2**62, 1.0
        if draft is not None:
            config.num_assistant_tokens = s["k"]
        x = numpy.array([ids], dtype=numpy.int64)
        inputs = og.TokenizedInputs(openvino.Tensor(x), openvino.Tensor(numpy.ones_like(x)))
        return [int(t) for t in pipeline.generate(inputs, config).tokens[0]]

    return run


def _to_openvino(s: Settings, source: str, out: Path) -> list[str]:
    program = Path(sys.executable).parent / "optimum-cli"
    how = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    return [str(program), "export", "openvino", "--model", source, *how, str(out)]


def _converted(
    s: Settings, command: Callable[[Settings, str, Path], list[str]], engine: str
) -> tuple[Path, Path | None]:
    """Target and draft in the engine's own format; converted once."""
    made: list[Path | None] = []
    for role in ("target", "draft"):
        out = Path(s["scratch"]) / f"{engine}-{role}"
        if s[role] and not (out / "done").exists():
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run(command(s, s[role], out), check=True, stdout=subprocess.DEVNULL)
            (out / "done").touch()
        made.append(out if s[role] else None)
    assert made[0] is not None
    return made[0], made[1]


ENGINES = {f.__name__: f for f in (outpace, transformers, vllm, onnx, openvino)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is not an answer
    settings = json.loads(sys.argv[1])
    run = ENGINES[settings["engine"]](settings)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.perf_counter()
        tokens = run(job["ids"], job["temperature"], job["seed"])
        seconds = time.perf_counter() - began
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
