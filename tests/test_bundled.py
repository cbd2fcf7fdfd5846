"""The bundled model is what its card says: its size, its making, its measured quality."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from agreement_data import normal_form, split_rows
from evaluate import Judge, blimp, share

from lrpx.model import BUNDLED

ROOT = Path(__file__).parent.parent
FOLDER = Path(str(BUNDLED))
AGREEMENT = ROOT.parent / "shared/data/agreement"
REGULAR = "regular_plural_subject_verb_agreement_1"


@pytest.fixture(scope="module")
def judge():
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    return Judge(model, transformers.AutoTokenizer.from_pretrained(FOLDER))


@pytest.fixture(scope="module")
def agreement():
    if not AGREEMENT.is_dir():
        pytest.skip(f"the agreement sentences are not at {AGREEMENT}")
    return AGREEMENT


def recorded():
    return json.loads((ROOT / "training/evaluation.json").read_text())


def test_it_is_a_small_llama_that_loads_as_float32(judge):
    config = judge.model.config
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16 * 2**20
    assert config.model_type == "llama"
    assert config.num_key_value_heads < config.num_attention_heads
    assert judge.model.dtype == torch.float32


def test_its_recorded_quality_reaches_the_bars():
    assert recorded()["held_out_agreement"]["rows"] >= 4000
    assert recorded()["held_out_agreement"]["accuracy"] >= 0.90
    assert recorded()[f"blimp_{REGULAR}"]["accuracy"] >= 0.95


def test_its_card_gives_the_recorded_numbers():
    card = (FOLDER / "README.md").read_text()
    for name in ("held_out_agreement", f"blimp_{REGULAR}"):
        assert f"{100 * recorded()[name]['accuracy']:.1f} %" in card
    assert str(recorded()["perplexity"]["novels"]["per_token"]) in card


def test_no_held_out_sentence_is_in_the_training_part(agreement):
    training, held_out = split_rows(agreement)
    assert len(held_out) == recorded()["held_out_agreement"]["rows"]
    assert not {normal_form(row.sentence) for row in training} & {normal_form(row.sentence) for row in held_out}


def test_it_agrees_on_held_out_rows_as_recorded(judge, agreement):
    """A tenth of the rows, within three standard errors of the recorded share."""
    rows = split_rows(agreement)[1][::10]
    found = share(judge.prefers([(r.prefix, r.right, r.wrong, r.masked.split("***mask***")[1]) for r in rows]))
    whole = recorded()["held_out_agreement"]["accuracy"]
    assert abs(found - whole) < 3 * (whole * (1 - whole) / len(rows)) ** 0.5


def test_it_agrees_on_blimp_as_recorded(judge, agreement):
    found = blimp(judge, agreement / f"blimp_{REGULAR}.jsonl")
    assert found["accuracy"] == pytest.approx(recorded()[f"blimp_{REGULAR}"]["accuracy"], abs=0.003)
