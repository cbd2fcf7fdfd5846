"""Attribution: a value that can be grouped, saved, loaded again, and never trusts a file."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lrpx
from lrpx.attribution import FORMAT, Attribution, Explained, Prediction, Provenance, scale
from lrpx.errors import InputError, ResultFileError
from lrpx.ledger import KINDS, Entry, Ledger

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(["\0", "🙂[1/2]", "é", "</b>"])
NUMBERS = st.floats(-1e30, 1e30)
ENTRIES = st.builds(Entry, st.sampled_from(KINDS), TEXTS, NUMBERS)


def attribution(tokens=("The", " key", "s", " are"), relevance=(0.5, -1.0, 2.0, 0.25), **fields):
    count = len(tokens)
    default = {
        "explained": Explained("logit of ' are'", 1.75, count - 1),
        "prediction": Prediction(" are", 5, 0.75),
        "provenance": Provenance("tiny", None, "lrp", "linear=unmodified", "float64", "cpu", {"torch": "2"}),
        "ids": tuple(range(count)),
        "word_spans": tuple((i, i + 1) for i in range(count)),
        "word_texts": tuple(tokens),
        "special": (False,) * count,
        "segments": (("input", 0, count),),
    }
    return Attribution(tuple(tokens), torch.tensor(relevance, dtype=torch.float64), **default | fields)


KEYS = attribution(word_spans=((0, 1), (1, 3), (3, 4)), word_texts=("The", " keys", " are"))


@st.composite
def attributions(draw):
    tokens = draw(st.lists(TEXTS, min_size=1, max_size=8))
    count = len(tokens)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    spans = tuple(zip([0, *cuts], [*cuts, count], strict=True))
    return attribution(
        tokens,
        draw(st.lists(NUMBERS, min_size=count, max_size=count)),
        explained=Explained(draw(TEXTS), draw(NUMBERS), draw(st.none() | st.integers(0, 10))),
        word_spans=spans,
        word_texts=tuple("".join(tokens[a:b]) for a, b in spans),
        special=tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        segments=(("encoder", 0, spans[0][1]), ("decoder", spans[0][1], count)),
        ledger=draw(st.none() | st.builds(Ledger, st.lists(ENTRIES, max_size=3).map(tuple), NUMBERS)),
    )


# ------------------------------------------------------------------------ saving and loading


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=attributions())
def test_a_saved_attribution_loads_as_it_was(tmp_path, made):
    made.save(tmp_path / "a.safetensors")
    loaded = lrpx.Attribution.load(str(tmp_path / "a.safetensors"))
    assert loaded == made
    assert dataclasses.replace(loaded, relevance=made.relevance) == made
    assert json.loads(json.dumps(made.to_dict()))["relevance"] == made.relevance.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_precision_is_kept(tmp_path, dtype):
    made = dataclasses.replace(KEYS, relevance=KEYS.relevance.to(dtype))
    made.save(tmp_path / "a")
    assert lrpx.Attribution.load(tmp_path / "a").relevance.dtype == dtype
    assert lrpx.Attribution.load(tmp_path / "a") == made != KEYS


def test_missing_folders_are_named(tmp_path):
    path = tmp_path / "no" / "such" / "a.safetensors"
    with pytest.raises(ResultFileError, match=r"cannot write .*a\.safetensors.*folder"):
        KEYS.save(path)
    with pytest.raises(ResultFileError, match=r"cannot write .*there is no folder .*such; create it first"):
        KEYS.to_html(path)
    with pytest.raises(ResultFileError, match=r"there is no file .*a\.safetensors; check the path"):
        lrpx.Attribution.load(path)


def test_a_folder_is_no_file(tmp_path):
    for act in (KEYS.save, KEYS.to_html, lrpx.Attribution.load):
        with pytest.raises(ResultFileError, match=str(tmp_path)):
            act(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 9, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    KEYS.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ResultFileError, match=r"is not a readable LRPx result.*save it again"):
        lrpx.Attribution.load(path)


def test_other_files_are_refused(tmp_path):
    for content in (b"<html>", b"\0" * 64, struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"{}"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ResultFileError, match="is not a readable LRPx result"):
            lrpx.Attribution.load(tmp_path / "a")
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.ones(2)}, tmp_path / "a", metadata)
        with pytest.raises(ResultFileError, match="is not a readable LRPx result"):
            lrpx.Attribution.load(tmp_path / "a")


def test_a_pickle_is_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    (tmp_path / "a").write_bytes(pickle.dumps(Bomb()))
    torch.save(Bomb(), tmp_path / "b")
    for name in "ab":
        with pytest.raises(ResultFileError, match="is not a readable LRPx result"):
            lrpx.Attribution.load(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def written(tmp_path, metadata, relevance=KEYS.relevance):
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    save_file({"relevance": relevance}, tmp_path / "a", {"lrpx": text})
    return tmp_path / "a"


@pytest.mark.parametrize("version", [FORMAT + 1, 10**40, "1", None, [1], True, 1.0])
def test_a_newer_format_says_so(tmp_path, version):
    path = written(tmp_path, KEYS._metadata() | {"format": version})
    with pytest.raises(ResultFileError, match=r"has result format .*reads up to 1; upgrade lrpx"):
        lrpx.Attribution.load(path)


@pytest.mark.parametrize(
    "text",
    ["", "null", "7", "[]", '"text"', "{", "[" * 100_000, "9" * 5000, '{"format": 1}', '{"format": 1, "tokens": null}'],
)
def test_hostile_json_is_refused(tmp_path, text):
    with pytest.raises(ResultFileError):
        lrpx.Attribution.load(written(tmp_path, text))


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(Attribution) if f.name not in ("relevance", "heads")]
)
def test_a_field_that_is_missing_or_of_another_type_is_refused(tmp_path, field):
    whole = KEYS._metadata()
    path = written(tmp_path, {name: value for name, value in whole.items() if name != field})
    with pytest.raises(ResultFileError, match=f"lacks a part.*{field}"):
        lrpx.Attribution.load(path)
    for wrong in (
        7,
        "text",
        [7, "x"],
        [[[]]],
        {"a": {}},
        [["input", 0, 99]],
        [[0, 10**9]],
        ["x"] * 5,
        1e999,
        [None] * 4,
    ):
        with pytest.raises(ResultFileError, match=r"lacks a part of an LRPx result, or holds a wrong one"):
            lrpx.Attribution.load(written(tmp_path, whole | {field: wrong}))


BALANCED = Ledger((Entry("tokens", "wte", 1.5), Entry("biases", "h.0.mlp.bias", 0.25)), explained=1.75)


def test_a_ledger_is_saved_loaded_and_compared(tmp_path):
    made = dataclasses.replace(KEYS, ledger=BALANCED)
    made.save(tmp_path / "a")
    loaded = lrpx.Attribution.load(tmp_path / "a")
    assert loaded == made != KEYS
    assert loaded.ledger == BALANCED
    assert loaded.ledger.closes()
    assert made.to_dict()["ledger"]["entries"][1] == {"kind": "biases", "name": "h.0.mlp.bias", "value": 0.25}


def test_words_and_spans_keep_the_ledger():
    made = dataclasses.replace(KEYS, ledger=BALANCED)
    assert made.words().ledger == made.spans([(0, 2)]).ledger == BALANCED


ENTRY = {"kind": "tokens", "name": "wte", "value": 1.0}


@pytest.mark.parametrize(
    "ledger",
    [
        {},
        {"entries": []},
        {"explained": 1.0},
        {"entries": [], "explained": 1.0, "more": 1},
        {"entries": {}, "explained": 1.0},
        {"entries": [ENTRY], "explained": None},
        {"entries": [ENTRY], "explained": True},
        {"entries": [ENTRY], "explained": float("nan")},
        {"entries": [ENTRY], "explained": 10**400},
        {"entries": [7], "explained": 1.0},
        {"entries": [["tokens", "wte", 1.0]], "explained": 1.0},
        *(
            {"entries": [ENTRY | wrong], "explained": 1.0}
            for wrong in (
                {"kind": "magic"},
                {"kind": None},
                {"kind": ["tokens"]},
                {"name": 7},
                {"value": "1"},
                {"value": None},
                {"value": True},
                {"value": float("inf")},
                {"more": 1},
            )
        ),
        {"entries": [{"kind": "tokens", "name": "wte"}], "explained": 1.0},
    ],
)
def test_a_ledger_that_is_none_is_refused(tmp_path, ledger):
    with pytest.raises(ResultFileError, match=r"holds a wrong one"):
        lrpx.Attribution.load(written(tmp_path, KEYS._metadata() | {"ledger": ledger}))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number):
    whole = KEYS._metadata()
    for field, name in (("explained", "value"), ("prediction", "probability")):
        with pytest.raises(ResultFileError, match=r"holds a wrong one"):
            lrpx.Attribution.load(written(tmp_path, whole | {field: whole[field] | {name: number}}))


@pytest.mark.parametrize(
    "relevance",
    [torch.ones(3), torch.ones(4, 1), torch.ones(()), torch.ones(4, dtype=torch.int64), torch.ones(0)],
)
def test_relevance_that_does_not_fit_the_tokens_is_refused(tmp_path, relevance):
    with pytest.raises(ResultFileError, match="relevance is not 4 floating-point numbers"):
        lrpx.Attribution.load(written(tmp_path, KEYS._metadata(), relevance))


# -------------------------------------------------------------------------------- grouping


def test_words_sum_their_tokens():
    words = KEYS.words()
    assert words.tokens == ("The", " keys", " are")
    assert words.relevance.tolist() == [0.5, 1.0, 0.25]
    assert words.ids == ()
    assert words.words() == words


@settings(max_examples=60, deadline=None)
@given(made=attributions(), data=st.data())
def test_words_and_spans_conserve_the_sum_and_the_text(made, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(made)))))
    spans = list(pairwise(cuts))[::2]
    for grouped in (made.words(), made.spans(spans), made.spans([])):
        assert float(grouped.relevance.sum()) == pytest.approx(float(made.relevance.sum()), rel=1e-9, abs=1e17)
        assert "".join(grouped.tokens) == "".join(made.tokens)
        assert len(grouped) == len(grouped.relevance) == len(grouped.special) == len(grouped.word_spans)
        (_, a, b), (_, c, d) = grouped.segments
        assert a == 0
        assert b == c
        assert d == len(grouped)
    assert made.spans([]).relevance.equal(made.relevance)


def test_segments_follow_the_grouping():
    both = attribution(segments=(("encoder", 0, 3), ("decoder", 3, 4)))
    assert both.spans([(0, 2)]).segments == (("encoder", 0, 2), ("decoder", 2, 3))
    assert both.spans([(1, 3)]).segments == (("encoder", 0, 2), ("decoder", 2, 3))


def test_a_group_is_special_when_all_of_it_is():
    made = attribution(special=(True, True, False, True))
    assert made.spans([(0, 2), (2, 4)]).special == (True, False)


@pytest.mark.parametrize("spans", [[(2, 2)], [(3, 2)], [(-1, 2)], [(0, 5)]])
def test_a_span_that_is_no_range_is_refused(spans):
    with pytest.raises(InputError, match=r"is not a range of the 4 tokens; pass half-open ranges"):
        KEYS.spans(spans)


def test_overlapping_spans_are_refused():
    with pytest.raises(InputError, match=r"span \(1, 3\) overlaps the one before it; pass disjoint spans"):
        KEYS.spans([(1, 3), (0, 2)])


def test_an_attribution_made_without_words_says_so():
    bare = Attribution(KEYS.tokens, KEYS.relevance, KEYS.explained, KEYS.prediction, KEYS.provenance)
    with pytest.raises(InputError, match=r"has no word_spans; pass the ranges to spans\(\)"):
        bare.words()
    assert bare.spans([(1, 3)]).tokens == ("The", " keys", " are")


# --------------------------------------------------------------------------------- a value


def test_it_is_frozen_and_compares_by_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KEYS.tokens = ()
    again = attribution(word_spans=KEYS.word_spans, word_texts=KEYS.word_texts)
    assert again == KEYS
    assert KEYS in [again]
    assert dataclasses.replace(again, relevance=again.relevance + 1) != KEYS
    assert dataclasses.replace(again, ids=(9, 9, 9, 9)) != KEYS
    assert KEYS != "text"


@given(st.lists(NUMBERS, max_size=6))
def test_the_colour_scale_covers_all_but_one_sink(values):
    limit, sink = scale(torch.tensor(values, dtype=torch.float64))
    rest = [abs(value) for i, value in enumerate(values) if i != sink]
    assert limit == max(rest, default=0.0)
