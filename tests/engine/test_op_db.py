"""torch's own operator database: each operation is right, or refused by name; none crashes, none ends the process.

``op_db.py`` judges, in a process of its own; one operation that ends it is one that fails, and the next goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="torch's database of operators needs expecttest")

ROOT = Path(__file__).resolve().parents[2]

Results = dict[str, list[dict[str, str]]]


def judged(samples: int, *names: str) -> Results:
    """The verdicts on each operation, or on those of these names."""
    found: Results = {}
    first = 0
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    while True:
        command = [sys.executable, "-m", "tests.engine.op_db", str(samples), str(first), *names]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        name, at = "", ""
        for line in map(json.loads, done.stdout.splitlines()):
            if "number" in line:
                name, first, at = line["op"], line["number"] + 1, ""
            elif "results" in line:
                found[line["op"]] = line["results"]
                name = ""
            else:
                at = line["at"]
        if done.returncode == 0:
            return found
        assert name, done.stderr[-2000:]
        found[name] = [{"at": at, "verdict": "crash", "why": f"the process ended with {done.returncode}"}]


def check(found: Results) -> None:
    """Nothing is wrong, and what is refused says so."""
    bad = [
        f"{name}, {result['at']}: {result['verdict']}: {result['why']}"
        for name, results in found.items()
        for result in results
        if result["verdict"] in ("wrong", "crash")
    ]
    assert not bad, "\n".join(bad[:30])
    silent = [
        (name, result["why"])
        for name, results in found.items()
        for result in results
        if result["verdict"] == "refused" and not (" calls " in result["why"] and "strict=False" in result["why"])
    ]
    assert not silent, silent[:10]
    assert kept(found) >= OBVIOUS


def kept(found: Results) -> set[str]:
    """The operations of which nothing is refused."""
    return {name for name, results in found.items() if results and all(r["verdict"] != "refused" for r in results)}


OBVIOUS = frozenset(
    """add mul addmm addcmul addcdiv addr kron outer prod cumprod nanmean neg meshgrid_list_of_tensors atleast_1d
    atleast_2d atleast_3d matmul linalg_vecdot linalg_multi_dot linalg_cross nn_functional_instance_norm
    nn_functional_elu nn_functional_hardtanh nn_functional_leaky_relu nn_functional_grid_sample nn_functional_prelu
    nn_functional_threshold clamp clamp_min pow hypot logaddexp fft_fft2 fft_rfftn fft_hfft fft_ihfftn fft_fftshift
    index_add index_copy index_put scatter scatter_add quantile aminmax broadcast_tensors einsum tensordot
    nn_functional_bilinear nn_functional_conv2d nn_functional_layer_norm nn_functional_group_norm
    nn_functional_scaled_dot_product_attention softmax log_softmax logsumexp""".split()
)
"""Nothing of these is refused."""


def test_one_sample_of_what_is_not_refused_in_every_spelling() -> None:
    check(judged(1, *sorted(OBVIOUS)))


@pytest.mark.slow
def test_some_samples_of_each_operation_in_every_spelling() -> None:
    found = judged(3)
    check(found)
    assert sum(any(each["verdict"] == "right" for each in results) for results in found.values()) > 570
    assert len(kept(found)) > 430
