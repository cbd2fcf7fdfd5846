"""Attribution: a value that can be grouped, saved, loaded again, and never trusts a file."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import struct
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lrpx
from lrpx._saving import CHECKSUM, FORMAT, checksum, metadata
from lrpx.attribution import Attribution, Explained, Prediction, Provenance, Token, scale
from lrpx.errors import InputError, MissingExtraError, ResultError, ResultFileError
from lrpx.ledger import KINDS, Entry, Ledger
from lrpx.parts import Part, Parts

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(["\0", "🙂[1/2]", "é", "</b>"])
NUMBERS = st.floats(-1e30, 1e30)
ENTRIES = st.builds(Entry, st.sampled_from(KINDS), TEXTS, NUMBERS)


def of_tokens(relevance):
    return Part("tokens", torch.as_tensor(relevance, dtype=torch.float64), ("token",))


def attribution(tokens=("The", " key", "s", " are"), relevance=(0.5, -1.0, 2.0, 0.25), parts=(), **fields):
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
    return Attribution(tuple(tokens), Parts([of_tokens(relevance), *parts]), **default | fields)


def with_relevance(a, relevance):
    return dataclasses.replace(a, parts=Parts([Part("tokens", relevance, ("token",))]))


KEYS = attribution(word_spans=((0, 1), (1, 3), (3, 4)), word_texts=("The", " keys", " are"))


AXES = [("layer", "head", "token"), ("token", "neuron"), ("answer token", "token"), ("row", "column", "channel")]


@st.composite
def more_parts(draw, count):
    """Parts beside the tokens, with that axis anywhere or nowhere, and names along others."""
    parts = []
    for name, axes in zip("abc", draw(st.lists(st.sampled_from(AXES), max_size=3)), strict=False):
        sizes = [count if axis == "token" else draw(st.integers(0, 3)) for axis in axes]
        values = torch.randn(sizes, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
        labels = {axis: draw(st.lists(TEXTS, min_size=n, max_size=n)) for axis, n in zip(axes, sizes, strict=True)}
        parts.append(Part(name, values.to(dtype), axes, draw(st.sampled_from([{}, labels]))))
    return parts


@st.composite
def attributions(draw):
    tokens = draw(st.lists(TEXTS, min_size=1, max_size=8))
    count = len(tokens)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    spans = tuple(zip([0, *cuts], [*cuts, count], strict=True))
    return attribution(
        tokens,
        draw(st.lists(NUMBERS, min_size=count, max_size=count)),
        parts=draw(more_parts(count)),
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
    assert list(loaded.parts) == list(made.parts)
    plain = json.loads(json.dumps(made.to_dict()))
    for name, part in made.parts.items():
        assert plain["parts"][name]["values"] == part.values.tolist()
        assert plain["parts"][name]["axes"] == list(part.axes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_precision_is_kept(tmp_path, dtype):
    made = with_relevance(KEYS, KEYS.relevance.to(dtype))
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
    with pytest.raises(ResultFileError, match="is a folder; name a file that save\\(\\) wrote"):
        lrpx.Attribution.load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 9, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    KEYS.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ResultFileError, match=r"is not a readable LRPx result.*save it again"):
        lrpx.Attribution.load(path)


def test_other_files_are_refused(tmp_path):
    for content in (b"<html>", b"\0" * 64, struct.pack("<Q", 2**60) + b"{}"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ResultFileError, match=r"is not a readable LRPx result.*name a file that save\(\) wrote"):
            lrpx.Attribution.load(tmp_path / "a")
    for tensors, other in (
        ({"weight": torch.ones(2)}, None),
        ({"weight": torch.ones(2)}, {"format": "pt"}),
        ({}, None),
    ):
        save_file(tensors, tmp_path / "a", other)
        with pytest.raises(ResultFileError, match=r"holds no LRPx result; name a file that save\(\) wrote"):
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


def written(tmp_path, fields, **tensors):
    text = fields if isinstance(fields, str) else json.dumps(fields)
    numbers = {"tokens": KEYS.relevance.clone()} | tensors
    save_file(numbers, tmp_path / "a", {"lrpx": text, CHECKSUM: checksum(text, numbers)})
    return tmp_path / "a"


@pytest.mark.parametrize("version", [FORMAT + 1, 10**40, "2", None, [2], True, 2.0])
def test_a_newer_format_says_so(tmp_path, version):
    path = written(tmp_path, metadata(KEYS) | {"format": version})
    with pytest.raises(ResultFileError, match=r"has result format .*reads format 5; upgrade lrpx"):
        lrpx.Attribution.load(path)


def test_an_older_format_says_so(tmp_path):
    save_file({"relevance": torch.ones(4)}, tmp_path / "a", {"lrpx": json.dumps({"format": 1, "tokens": ["a"] * 4})})
    with pytest.raises(ResultFileError, match=r"has result format 1, this lrpx reads format 5; make it again"):
        lrpx.Attribution.load(tmp_path / "a")


@pytest.mark.parametrize(
    "text",
    ["", "null", "7", "[]", '"text"', "{", "[" * 100_000, "9" * 5000, '{"format": 5}', '{"format": 5, "tokens": null}'],
)
def test_hostile_json_is_refused(tmp_path, text):
    with pytest.raises(ResultFileError):
        lrpx.Attribution.load(written(tmp_path, text))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Attribution)])
def test_a_field_that_is_missing_or_of_another_type_is_refused(tmp_path, field):
    whole = metadata(KEYS)
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
        lrpx.Attribution.load(written(tmp_path, metadata(KEYS) | {"ledger": ledger}))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number):
    whole = metadata(KEYS)
    for field, name in (("explained", "value"), ("prediction", "probability")):
        with pytest.raises(ResultFileError, match=r"holds a wrong one"):
            lrpx.Attribution.load(written(tmp_path, whole | {field: whole[field] | {name: number}}))


@pytest.mark.parametrize(
    "relevance",
    [torch.ones(3), torch.ones(4, 1), torch.ones(()), torch.ones(4, dtype=torch.int64), torch.ones(0)],
)
def test_relevance_that_does_not_fit_the_tokens_is_refused(tmp_path, relevance):
    with pytest.raises(ResultFileError, match=r"holds a wrong one.*(part|fit 4 tokens)"):
        lrpx.Attribution.load(written(tmp_path, metadata(KEYS), tokens=relevance))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("word_spans", [[0, 1], [1, 3], [2, 4]]),
        ("word_spans", [[1, 3], [0, 1], [3, 4]]),
        ("word_spans", [[0, 1], [1, 1], [3, 4]]),
        ("word_spans", [[0, 1], [1, 3], [3, 9]]),
        ("word_spans", [[0, 1], [-2, 3], [3, 4]]),
        ("ids", [0, 1, 2, -1]),
        *(("explained", {"position": wrong}) for wrong in (-5, "0", 1.0, True)),
        *(("prediction", {"probability": wrong}) for wrong in (7.0, -0.1, "1")),
        ("prediction", {"id": -1}),
        *(("provenance", {"revision": wrong}) for wrong in (7, ["main"], {}, True)),
    ],
)
def test_fields_that_cannot_be_are_refused(tmp_path, field, wrong):
    whole = metadata(KEYS)
    wrong = whole[field] | wrong if isinstance(wrong, dict) else wrong
    with pytest.raises(ResultFileError, match="holds a wrong one"):
        lrpx.Attribution.load(written(tmp_path, whole | {field: wrong}))


@pytest.mark.parametrize(
    "relevance", [torch.tensor([1.0, float("nan"), 0.0, 0.0]), torch.tensor([1.0, float("-inf"), 0.0, 0.0]),
                  torch.ones(4).to(torch.float8_e4m3fn)]
)  # fmt: skip
def test_relevance_that_is_no_number_is_refused(tmp_path, relevance):
    with pytest.raises(ResultFileError, match="holds a wrong one"):
        lrpx.Attribution.load(written(tmp_path, metadata(KEYS), tokens=relevance))


def test_a_file_of_which_a_bit_was_lost_is_refused(tmp_path):
    """Wherever it is: in the numbers, where no other check would see it, or in the description."""
    made = dataclasses.replace(KEYS, ledger=BALANCED)
    path = tmp_path / "a"
    made.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert lrpx.Attribution.load(path) == made, "a bit of the padding, or of JSON's own spelling"
        except ResultFileError:
            continue
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ResultFileError, match="was changed since it was written: its checksum is another"):
        lrpx.Attribution.load(path)
    path.write_bytes(whole)
    assert lrpx.Attribution.load(path) == made


TOKENS = {"tokens": {"axes": ["token"], "labels": {}}}


@pytest.mark.parametrize(
    ("parts", "tensors"),
    [
        ({}, {}),
        ({"heads": {"axes": ["head", "token"], "labels": {}}}, {}),
        (TOKENS, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": {}}}, {}),
        (TOKENS | {"heads": {"axes": ["head", "token"]}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": {}, "name": "h"}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": {}, "values": []}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": "ht", "labels": {}}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", 7], "labels": {}}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "<b>"], "labels": {}}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": []}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": {"head": "x"}}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": {"head": [7]}}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": {"layer": ["x"]}}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": {"axes": ["head", "token"], "labels": {}}}, {"heads": torch.ones(4, 1)}),
        (TOKENS | {"heads": {"axes": ["head", "head"], "labels": {}}}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": None}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"heads": [["head", "token"], {}]}, {"heads": torch.ones(1, 4)}),
        (TOKENS | {"</td>": {"axes": ["head", "token"], "labels": {}}}, {"</td>": torch.ones(1, 4)}),
    ],
)
def test_parts_that_do_not_fit_their_tensors_are_refused(tmp_path, parts, tensors):
    with pytest.raises(ResultFileError, match=r"holds a wrong one"):
        lrpx.Attribution.load(written(tmp_path, metadata(KEYS) | {"parts": parts}, **tensors))


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
    border = made.segments[0][2]
    crosses = any(start < border < end for start, end in spans)
    for grouped, between in ((made.words(), 0), (made.spans(spans), int(crosses)), (made.spans([]), 0)):
        assert float(grouped.relevance.sum()) == pytest.approx(float(made.relevance.sum()), rel=1e-9, abs=1e17)
        assert list(grouped.parts) == list(made.parts)
        for name, part in grouped.parts.items():
            check_grouping(part, made.parts[name], grouped.tokens)
        assert "".join(grouped.tokens) == "".join(made.tokens)
        assert len(grouped) == len(grouped.relevance) == len(grouped.special) == len(grouped.word_spans)
        (_, a, b), (_, c, d) = grouped.segments
        assert a == 0
        assert c - b == between
        assert d == len(grouped)
    assert made.spans([]).parts == made.parts


def check_grouping(part, before, tokens):
    """Every axis but the tokens' is as it was, and so is each sum over the tokens, to the precision of the part."""
    assert (part.name, part.axes, part.values.dtype) == (before.name, before.axes, before.values.dtype)
    if "token" not in part.axes:
        assert part == before
        return
    at = part.axes.index("token")
    assert part.shape == before.shape | {"token": len(tokens)}
    size = before.values.double().abs().sum(at)
    error = (part.values.double().sum(at) - before.values.double().sum(at)).abs()
    assert bool((error <= torch.finfo(part.values.dtype).eps * before.shape["token"] * size).all())
    assert all(part.labels[axis] == before.labels[axis] for axis in before.labels if axis != "token")


def test_heads_are_grouped_with_their_tokens():
    heads = torch.arange(24.0).reshape(2, 3, 4)
    made = dataclasses.replace(
        KEYS, parts=Parts([*KEYS.parts.values(), Part("heads", heads, ("layer", "head", "token"))])
    )
    for grouped in (made.words(), made.spans([(1, 3)])):
        assert grouped.parts["heads"].values.shape == (2, 3, 3)
        assert grouped.parts["heads"].values[1, 2].tolist() == [20.0, 21.0 + 22.0, 23.0]


def test_segments_follow_the_grouping():
    both = attribution(segments=(("encoder", 0, 3), ("decoder", 3, 4)))
    assert both.spans([(0, 2)]).segments == (("encoder", 0, 2), ("decoder", 2, 3))
    assert both.spans([(1, 3)]).segments == (("encoder", 0, 2), ("decoder", 2, 3))  # up to the border, and not over it


def test_the_position_follows_the_grouping():
    assert KEYS.explained.position == 3
    assert KEYS.words().explained.position == 2
    assert KEYS.spans([(1, 4)]).explained.position == 1
    assert KEYS.words().to_dict()["explained"]["position"] == 2
    assert KEYS.by_segment().explained.position == 0
    both = {"segments": (("encoder", 0, 2), ("decoder", 2, 4)), "explained": Explained("logit", 1.0, 1)}
    for made in (attribution(**both), attribution(**both).spans([(0, 2)])):
        assert made.explained.position == 1  # within the decoder
        assert made.by_segment().explained.position == 0
    assert attribution(explained=Explained("logit", 1.0, None)).words().explained.position is None


def test_a_span_over_the_border_of_a_segment_is_in_none():
    """It was counted with the later one: the assistant's −1 + 2 + 0.25 for a span that has the user's −1."""
    both = attribution(segments=(("user", 0, 2), ("assistant", 2, 4)))
    over = both.spans([(1, 3)])
    assert [(token.text, token.segment) for token in over] == [("The", "user"), (" keys", ""), (" are", "assistant")]
    told = over.by_segment()
    assert (told.tokens, told.relevance.tolist()) == (("user", " keys", "assistant"), [0.5, 1.0, 0.25])
    assert both.spans([(0, 4)]).segments == (("user", 0, 0), ("assistant", 1, 1))
    decoder = {"segments": (("encoder", 0, 2), ("decoder", 2, 4)), "explained": Explained("logit", 1.0, 1)}
    assert attribution(**decoder).spans([(1, 3)]).explained.position == 0


def test_a_word_ends_where_its_segment_does():
    whole = {"word_spans": ((0, 1), (1, 4)), "word_texts": ("a", "word")}
    made = attribution(segments=(("user", 0, 3), ("assistant", 3, 4)), **whole)
    words = made.words()
    assert words.tokens[1:] == ("".join(made.tokens[1:3]), made.tokens[3])
    assert words.by_segment().tokens == made.by_segment().tokens == ("user", "assistant")
    assert words.by_segment().relevance.tolist() == pytest.approx(made.by_segment().relevance.tolist())


def test_a_group_is_special_when_all_of_it_is():
    made = attribution(special=(True, True, False, True))
    assert made.spans([(0, 2), (2, 4)]).special == (True, False)


@pytest.mark.parametrize("spans", [[(2, 2)], [(3, 2)], [(-1, 2)], [(0, 5)]])
def test_a_span_that_is_no_range_is_refused(spans):
    with pytest.raises(InputError, match=r"is not a range of the 4 tokens; pass half-open ranges"):
        KEYS.spans(spans)


@pytest.mark.parametrize("spans", [[(0.5, 2)], [(1,)], 3, "ab", [slice(0, 2)]])
def test_spans_that_are_no_ranges_are_refused(spans):
    with pytest.raises(InputError, match=r"the spans are no list of ranges; pass half-open ranges of tokens"):
        KEYS.spans(spans)


def test_overlapping_spans_are_refused():
    with pytest.raises(InputError, match=r"span \(1, 3\) overlaps the one before it; pass disjoint spans"):
        KEYS.spans([(1, 3), (0, 2)])


def test_an_attribution_made_without_words_says_so():
    bare = Attribution(KEYS.tokens, KEYS.parts, KEYS.explained, KEYS.prediction, KEYS.provenance)
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
    assert with_relevance(again, again.relevance + 1) != KEYS
    assert with_relevance(again, again.relevance.float()) != KEYS
    assert dataclasses.replace(again, ids=(9, 9, 9, 9)) != KEYS
    assert KEYS != "text"
    with pytest.raises(TypeError, match="unhashable"):
        hash(KEYS)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_and_pickles_are_equal_and_as_frozen(again):
    made = attribution(parts=[HEADS], ledger=BALANCED)
    assert again(made) == made
    for values in (again(made).relevance, again(made).parts["heads"].values, made.words().relevance):
        with pytest.raises(ResultError, match=r"cannot be written into; work on a copy.*a\.relevance\.clone\(\)"):
            values[0] = 5.0


def test_a_part_must_fit_the_tokens():
    with pytest.raises(ResultError, match=r"heads \[head 1 × token 3\] does not fit 4 tokens; give it a number"):
        attribution(parts=[Part("heads", torch.ones(1, 3), ("head", "token"))])
    with pytest.raises(ResultError, match=r"there is no part 'tokens'; this result has heads"):
        dataclasses.replace(KEYS, parts=Parts([Part("heads", torch.ones(4), ("token",))]))
    with pytest.raises(ResultError, match=r"is not of tokens alone; give it the axes \('token',\)"):
        dataclasses.replace(KEYS, parts=Parts([Part("tokens", torch.ones(4, 1), ("token", "head"))]))
    with pytest.raises(ResultError, match=r"the parts are list; pass Parts"):
        dataclasses.replace(KEYS, parts=[of_tokens([1.0] * 4)])


def test_the_repr_is_short():
    long = attribution(["word "] * 3000, [1.0] * 3000, parts=[Part("heads", torch.ones(2, 3, 3000), AXES[0])])
    assert repr(KEYS) == "Attribution('The keys are', logit of ' are' = +1.75, lrp, Parts(tokens [token 4]))"
    assert len(repr(long)) < 200
    assert repr(long).endswith("Parts(tokens [token 3000], heads [layer 2 × head 3 × token 3000]))")
    hostile = attribution(["\x1b[2J\n\u202e"], [1.0], explained=Explained("\x1b[2J\n", 1.0, 0))
    assert repr(hostile).isprintable()


def test_iterating_gives_the_tokens():
    made = attribution(
        special=(False, True, False, False), ids=(5, 6, 7, 8), segments=(("encoder", 0, 2), ("decoder", 2, 3))
    )
    assert list(made) == [
        Token("The", 0.5, 0, 5, False, "encoder"),
        Token(" key", -1.0, 1, 6, True, "encoder"),
        Token("s", 2.0, 2, 7, False, "decoder"),
        Token(" are", 0.25, 3, 8, False, ""),
    ]
    assert [token.text for token in made.spans([(1, 3)])] == ["The", " keys", " are"]
    assert {token.id for token in made.spans([(1, 3)])} == {None}
    overlapping = attribution(segments=(("one", 0, 3), ("two", 2, 4)))
    assert [token.segment for token in overlapping] == ["one", "one", "one", "two"]


HEADS = Part("heads", torch.arange(24.0).reshape(2, 3, 4), AXES[0], {"head": ["a", "b", "c"]})


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_a_part_is_a_table_of_the_library_that_is_there(monkeypatch, library):
    pytest.importorskip(library)
    monkeypatch.setitem(sys.modules, {"polars": "pandas", "pandas": "polars"}[library], None)
    made = attribution(parts=[HEADS])
    table = made.to_dataframe()
    assert type(table).__module__.split(".")[0] == library
    assert list(table.columns) == ["token", "token text", "relevance"]
    assert list(table["token"]) == [0, 1, 2, 3]
    assert list(table["token text"]) == list(made.tokens)
    assert list(table["relevance"]) == made.relevance.tolist()
    heads = made.to_dataframe("heads")
    assert list(heads.columns) == ["layer", "head", "head text", "token", "token text", "relevance"]
    assert len(heads) == 24
    for layer, head, name, token, text, value in zip(*(list(heads[column]) for column in heads.columns), strict=True):
        assert value == HEADS.values[layer, head, token]
        assert name == "abc"[head]
        assert text == made.tokens[token]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_table_has_the_numbers_of_every_precision(dtype):
    pytest.importorskip("polars")
    made = with_relevance(attribution(["\ud800", "b"], [1, 2]), torch.tensor([0.1, 3.0], dtype=dtype))
    assert made.to_dataframe()["relevance"].to_list() == made.relevance.tolist()
    assert made.to_dataframe()["token text"].to_list() == ["\\ud800", "b"]


def test_a_table_without_a_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="a table needs polars or pandas: pip install polars"):
        KEYS.to_dataframe()
    with pytest.raises(ResultError, match="there is no part 'heads'; this result has tokens"):
        KEYS.to_dataframe("heads")


def test_a_table_with_two_columns_of_one_name_is_refused():
    made = attribution(parts=[Part("odd", torch.ones(4, 1), ("token", "token text"))])
    with pytest.raises(ResultError, match="two columns of one name; rename its axes"):
        made.to_dataframe("odd")


@settings(deadline=None)
@given(st.lists(NUMBERS, max_size=6))
def test_the_colour_scale_covers_all_but_one_sink(values):
    limit, sink = scale(torch.tensor(values, dtype=torch.float64))
    rest = [abs(value) for i, value in enumerate(values) if i != sink]
    assert limit == max(rest, default=0.0)


def test_tokens_that_are_in_no_word_stay_alone():
    a = dataclasses.replace(KEYS, word_spans=((1, 3),), word_texts=("two",))
    grouped = a.words()
    assert grouped.tokens == (KEYS.tokens[0], "two", *KEYS.tokens[3:])
    assert float(grouped.relevance.sum()) == pytest.approx(float(a.relevance.sum()))
    with pytest.raises(InputError, match="overlaps"):
        dataclasses.replace(KEYS, word_spans=((0, 2), (1, 3)), word_texts=("one", "two")).words()


def test_nobody_writes_into_the_versions(tmp_path):
    """They are shared by all results of a process."""
    versions = KEYS.provenance.versions
    for write in (
        lambda: versions.update(lrpx="9"),
        lambda: versions.__setitem__("lrpx", "9"),
        lambda: versions.pop("lrpx"),
        lambda: versions.setdefault("mine", "9"),
        lambda: versions.clear(),
        lambda: versions.__ior__({"lrpx": "9"}),
    ):
        with pytest.raises(ResultError, match="not to be written into; make a dict of it first"):
            write()
    assert copy.deepcopy(KEYS.provenance) == pickle.loads(pickle.dumps(KEYS.provenance)) == KEYS.provenance
    assert dataclasses.asdict(KEYS.provenance)["versions"] == dict(versions)
    assert type(KEYS.to_dict()["provenance"]["versions"]) is dict, "what is plain is the user's own"
    given = {"lrpx": "1"}
    made = dataclasses.replace(KEYS.provenance, versions=given)
    given["lrpx"] = "2"
    assert made.versions == {"lrpx": "1"}
