"""Put a trained model into the package: weights rounded to bfloat16, measured after rounding, with its card.

    python training/package.py --run runs/bundled --data ../shared/data

Writes ``src/lrpx/bundled`` and copies the training log beside the scripts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from jinja2 import Template
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
BUNDLED = HERE.parent / "src/lrpx/bundled"
LIMIT = 16 * 2**20


def last_steps(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last entry with a step of each run: a run begins where the data is counted."""
    ends: list[dict[str, Any]] = []
    for entry in log:
        if "agreement_rows" in entry:
            ends.append({})
        elif "minutes" in entry:
            ends[-1] = entry
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    BUNDLED.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.run / name, BUNDLED / name)
    weights = load_file(options.run / "model.safetensors")
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        BUNDLED / "model.safetensors",
        {"format": "pt"},
    )
    shutil.copy(options.run / "train.log", HERE / "train.log")
    log: list[dict[str, Any]] = [json.loads(line) for line in (HERE / "train.log").read_text().splitlines()]
    command = [sys.executable, HERE / "evaluate.py", "--data", options.data, "--model", BUNDLED]
    command += ["--text", options.run / "held_out_text.json"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (HERE / "evaluation.json").write_text(report)
    facts = {key: value for entry in log for key, value in entry.items()}
    facts |= {"phases": sum("agreement_rows" in entry for entry in log)}
    facts |= {name: sum(ends[name] for ends in last_steps(log)) for name in ("step", "tokens", "minutes")}
    card = Template((HERE / "model_card.md.j2").read_text(), keep_trailing_newline=True)
    (BUNDLED / "README.md").write_text(card.render(report=json.loads(report), **facts))
    size = sum(path.stat().st_size for path in BUNDLED.iterdir())
    print(f"{size / 2**20:.2f} MiB")
    if size > LIMIT:
        raise SystemExit("the bundled model is larger than 16 MiB")


if __name__ == "__main__":
    main()
