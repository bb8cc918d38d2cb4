"""What a record needs beside its figures: versions, machine, command, time."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import outpace

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Versions and machine, with no names of hosts or users in it."""
    import transformers

    arguments = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    return {
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "outpace": outpace.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": _processor(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    flags, name = "", platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            if key.strip() == "flags":
                flags = value
    wide = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags.split()]
    return f"{name}, {os.cpu_count()} cores, {' '.join(wide)}".rstrip(", ")


def record(name: str, rows: Any, show: bool = True) -> None:
    """Write `results/NAME.json` and print it."""
    RESULTS.mkdir(exist_ok=True)
    value = {"environment": environment(), "rows": rows}
    text = json.dumps(value, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    if show:
        print(text)
