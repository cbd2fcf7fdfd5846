"""The benchmarks that hide tokens: rows against a loop over single texts, resuming, reports, and bad input."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import polars as pl
import pytest
import torch
import transformers
from rich.cells import cell_len
from rich.console import Console

import lrpx
from lrpx.benchmarks import Run, find, keep
from lrpx.benchmarks._faithful_report import terminal, verdict
from lrpx.benchmarks._faithful_summary import summarise
from lrpx.benchmarks._faithfulness import Faithfulness, LeaveOneOutAgreement
from lrpx.benchmarks._report import figure
from lrpx.errors import DataError, InputError, MethodError, ModelError, ResultFileError, TargetError
from lrpx.methods import METHODS, Found, LeaveOneOut, Method
from lrpx.metrics import PERTURBATION_METRICS, perturbation_metric
from lrpx.model import BoundModel, Spec
from lrpx.runs import Store
from tests import tiny
from tests.reference import perturbation as twins
from tests.work import calls_of

TEXTS = [
    "The keys to the cabinet are on the table.",
    "What a lovely film",
    "The boys near the tree are tall, the girl is small.",
    "What a terrible ending!",
    "The key is old",
]
HOSTILE = "The <script>alert(1)</script> & $x_1$ \\input{a} | ~ \u202e key"
NAMES = ("attnlrp", "lrp", "gradient-x-input")


def table(folder, texts=TEXTS, labels=None, name="texts.tsv"):
    path = folder / name
    labels = ["positive", "negative", "2", "0", "mixed"] if labels is None else labels
    path.write_text(
        "text\tlabel\n" + "".join(f"{t}\t{n}\n" for t, n in zip(texts, labels, strict=True)), encoding="utf-8"
    )
    return path


def plain(folder, texts=TEXTS):
    path = folder / "plain.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.fixture
def classifier(piece_tokenizer):
    return BoundModel(tiny.bert_classifier(vocab_size=len(piece_tokenizer)), piece_tokenizer)


@pytest.fixture(scope="module")
def bundled():
    return Spec().build()


def rows_of(run):
    return pl.concat([pl.from_arrow(run.part(i)) for i in range(run.parts)]).to_dicts()


def by_hand(module, ids, hideable, read):
    """A function of hidden tokens among those that may be, by one run of the model for each set."""

    def value(hidden):
        mask = [1] * len(ids)
        for i in hidden:
            mask[hideable[i]] = 0
        with torch.no_grad():
            out = module(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask]))
        return read(out.logits[0])

    return value


def check(rows, module, ids_of, logits_of, classes, steps, said=("logit",)):
    """Every metric of every row, in every reading of the run, against the twins."""
    for row in rows:
        ids = ids_of(row)
        at = row["hideable"]

        def logits(out, row=row):
            return logits_of(out, row)

        whole = by_hand(module, ids, at, logits)(frozenset())
        target = int(whole.argmax())
        reads = {
            "logit": lambda z, t=target: float(z[t]),
            "probability": lambda z, t=target: float(z.softmax(-1)[t]),
            "log-probability": lambda z, t=target: float(z.log_softmax(-1)[t]),
            "squared-error": lambda z, t=target, w=whole: float(
                ((z - w) if classes else (z - w)[t : t + 1]).square().sum()
            ),
        }
        for name, metric in PERTURBATION_METRICS.items():
            if name not in twins.METRICS:
                continue
            for each in [metric.reads] if metric.reads else said:
                value = by_hand(module, ids, at, lambda out, read=reads[each], of=logits: read(of(out)))
                column = name if metric.reads or len(said) == 1 else f"{name} [{each}]"
                for method in NAMES[:2]:
                    relevance = [row[f"relevance/{method}"][i] for i in at]
                    wanted = twins.METRICS[name](relevance, value, steps)
                    assert row[f"{column}/{method}"] == pytest.approx(wanted, abs=1e-8), (column, method, row["id"])
        drawn = min(20, steps)
        curve = [
            twins.curve_at(
                [row["relevance/lrp"][i] for i in at],
                by_hand(module, ids, at, lambda out, of=logits, read=reads["logit"]: read(of(out))),
                math.floor(k * len(at) / drawn + 0.5),
                most_first=True,
            )
            for k in range(drawn + 1)
        ]
        assert row["curve most/lrp"] == pytest.approx(curve, abs=1e-8)


def test_a_classifiers_rows_are_those_of_the_twins(classifier, tmp_path):
    run = Run(Faithfulness(table(tmp_path)), classifier, NAMES[:2], list(PERTURBATION_METRICS))
    rows = rows_of(run)
    assert [row["label"] for row in rows] == ["positive", "negative", "mixed", "negative", "mixed"]
    ids = {row["id"]: classifier.tokenizer(text)["input_ids"] for row, text in zip(rows, TEXTS, strict=True)}
    for row in rows:
        last = len(row["tokens"]) - 1
        assert row["hideable"] == list(range(1, last))  # [CLS] and [SEP] are never hidden
        logits = classifier.module(input_ids=torch.tensor([ids[row["id"]]])).logits[0]
        assert row["correct"] == (int(logits.argmax()) == classifier.index(row["label"]))
        assert row["value"] == pytest.approx(float(logits.max()))
    check(rows, classifier.module, lambda row: ids[row["id"]], lambda logits, row: logits, True, 100)


@pytest.mark.slow
def test_a_language_models_rows_are_those_of_the_twins(byte_tokenizer, tmp_path):
    sizes = tiny.SIZES | {"vocab_size": len(byte_tokenizer), "num_key_value_heads": 2}
    model = BoundModel(tiny.build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)), byte_tokenizer)
    texts = [text[:14].strip() for text in TEXTS[:3]]
    run = Run(Faithfulness(plain(tmp_path, texts), steps=4), model, NAMES[:2], list(PERTURBATION_METRICS))
    rows, ids = rows_of(run), {}
    for row, text in zip(rows, texts, strict=True):
        *ids[row["id"]], last = byte_tokenizer(text)["input_ids"]
        assert row["label"] == model.label(last)
        assert row["hideable"] == list(range(len(row["tokens"])))
        assert len(row["tokens"]) == len(ids[row["id"]])

    class AllHidden(torch.nn.Module):
        """The last token sees itself alone, where all are hidden."""

        def forward(self, input_ids, attention_mask):
            if not attention_mask.any():
                attention_mask = attention_mask.clone()
                attention_mask[0, -1] = 1
            places = torch.arange(input_ids.shape[1])[None]
            return model.module(input_ids=input_ids, attention_mask=attention_mask, position_ids=places)

    said = ("logit", "log-probability")
    check(rows, AllHidden(), lambda row: ids[row["id"]], lambda logits, row: logits[-1], False, 4, said)


def test_a_masked_model_explains_its_mask(piece_tokenizer, tmp_path):
    model = BoundModel(tiny.build(transformers.BertForMaskedLM, transformers.BertConfig(**tiny.SIZES | {
        "vocab_size": len(piece_tokenizer)})), piece_tokenizer)  # fmt: skip
    texts = ["The keys are [MASK] the table", "no place to fill", "The [MASK] is tall"]
    run = Run(Faithfulness(table(tmp_path, texts, ["on", "the", "girl"])), model, ["lrp"], ["AOPC Δ"])
    rows = rows_of(run)
    assert [row["id"] for row in rows] == ["texts:2", "texts:4"]
    assert [row["position"] for row in rows] == [row["tokens"].index("[MASK]") if "[MASK]" in row["tokens"] else
            next(i for i, t in enumerate(row["tokens"]) if "[MASK]" in t) for row in rows]  # fmt: skip
    assert all(row["position"] not in row["hideable"] for row in rows)
    assert [each.reason for each in run.samples.dropped] == [
        "cannot be read: a masked language model is explained at '[MASK]', and the input has 0 of it"
    ]


@pytest.mark.parametrize("how", ["zero-embedding", "mask-token", "unk", "pad", "delete"])
def test_every_way_runs_and_moves_something(how, classifier, tmp_path):
    run = Run(Faithfulness(table(tmp_path), perturbation=how), classifier, ["lrp"], ["LOO Pearson", "AOPC Δ"])
    rows = rows_of(run)
    assert np.ptp([row["AOPC Δ/lrp"] for row in rows]) > 1e-6


def test_several_ways_and_readings_are_columns_of_their_own(classifier, tmp_path):
    both = Faithfulness(table(tmp_path), perturbation="attention-mask,zero-embedding", read_out="logit,probability")
    together = rows_of(Run(both, classifier, ["lrp"], ["AOPC Δ", "RISE"]))
    for way in ("attention-mask", "zero-embedding"):
        for read in ("logit", "probability"):
            one = Faithfulness(both.data, perturbation=way, read_out=read)
            for row, mine in zip(together, rows_of(Run(one, classifier, ["lrp"], ["AOPC Δ", "RISE"])), strict=True):
                assert row[f"AOPC Δ [{way}, {read}]/lrp"] == pytest.approx(mine["AOPC Δ/lrp"], abs=1e-9)
                assert row[f"RISE [{way}]/lrp"] == pytest.approx(mine["RISE/lrp"], abs=1e-9)


def test_a_next_token_is_read_in_two_ways_and_passes_once(bundled, classifier, tmp_path, monkeypatch):
    """Its logit and its log-probability come from the same passes; a class has its logit alone."""
    data = plain(tmp_path)
    rows, forward = [], bundled.module.forward

    def counted(*args, **more):
        rows.append(len(more["input_ids"]))
        return forward(*args, **more)

    monkeypatch.setattr(type(bundled), "accepts", lambda *_: True)
    monkeypatch.setattr(bundled.module, "forward", counted)

    def columns(benchmark, model):
        del rows[:]
        found = rows_of(Run(benchmark, model, ["lrp"], ["AOPC Δ", "RISE"]))[0]
        return [name for name in found if name.endswith("/lrp") and not name.startswith(("relevance", "curve"))]

    columns(Faithfulness(data), bundled)  # with what is tried once for a model
    assert columns(Faithfulness(data), bundled) == ["AOPC Δ [logit]/lrp", "AOPC Δ [log-probability]/lrp", "RISE/lrp"]
    passed = sum(rows)
    assert columns(Faithfulness(data, read_out="logit"), bundled) == ["AOPC Δ/lrp", "RISE/lrp"]
    assert sum(rows) == passed > 0
    assert columns(LeaveOneOutAgreement(data), bundled) == ["AOPC Δ/lrp", "RISE/lrp"]
    assert columns(Faithfulness(data), classifier) == ["AOPC Δ/lrp", "RISE/lrp"]


def test_what_is_explained_is_what_was_asked_for(classifier, tmp_path):
    data = table(tmp_path)
    for target, wanted in (("label", ["positive", "negative", "mixed", "negative", "mixed"]), ("mixed", ["mixed"] * 5)):
        rows = rows_of(Run(Faithfulness(data, target=target), classifier, ["lrp"], ["AOPC Δ"]))
        assert [re.search("'(.*)'", row["explained"])[1] for row in rows] == wanted


def test_leave_one_out_is_not_compared_with_itself(classifier, tmp_path):
    both = Faithfulness(table(tmp_path), perturbation="attention-mask,unk")
    rows = rows_of(Run(both, classifier, ["lrp", "leave-one-out"], ["LOO Pearson", "AOPC Δ"]))
    assert {row["LOO Pearson [attention-mask]/leave-one-out"] for row in rows} == {None}
    assert all(row["LOO Pearson [unk]/leave-one-out"] is not None for row in rows)
    assert all(row["LOO Pearson [attention-mask]/lrp"] is not None for row in rows)


def test_the_batches_are_full(bundled, tmp_path, monkeypatch):
    """The sets of all texts, methods and metrics share forward passes, and equal ones run once."""
    run = Run(Faithfulness(plain(tmp_path), steps=10), bundled, NAMES, ["AOPC Δ", "ΔA flipping", "AUAC pruning"])
    monkeypatch.setattr(type(bundled), "accepts", lambda *_: True)
    run.part(0)  # what is tried of the model once is tried before the passes are counted
    with calls_of(bundled.module, lambda named: len(named["input_ids"])) as rows:
        run.part(0)
    asked = sum(
        len(each.sets(lrpx.metrics.Given(np.arange(float(len(sample.hideable))), steps=10)))
        for sample in run.samples.kept
        for each in run.metrics
        for _ in NAMES
    )
    assert sum(rows) < asked  # equal ones run once
    assert len(rows) < sum(rows) / 8


# ---------------------------------------------------------------------------------------- the command


def test_the_command(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain(tmp_path, [*TEXTS, HOSTILE, "x"])
    options = ["--data", "plain.txt", "--methods", "attnlrp,lrp,gradient-x-input,leave-one-out", "--steps", 5]
    code, out, err = run("benchmark", "faithfulness", *options, "--out", "found", "--show", "plain:6")
    assert code == 0, err
    assert "has the best mean rank" in " ".join(out.split())
    assert "agrees with" in out
    assert "found/curves.png" in out
    assert (tmp_path / "found" / "curves.png").read_bytes().startswith(b"\x89PNG")
    page, text = ((tmp_path / "found" / name).read_text(encoding="utf-8") for name in ("report.html", "table.md"))
    assert "<script" not in page
    assert "http:" not in page.replace("http://www.w3.org", "")
    assert "https:" not in page
    for each in lrpx.benchmarks.BENCHMARKS["faithfulness"](tmp_path / "plain.txt").usual():
        reads = [""] if PERTURBATION_METRICS[each].reads else [" [logit]", " [log-probability]"]
        for read in reads:
            assert f"{each}{read} " in page
            assert f"| {each}{read} " in text.replace("\\", "")
    assert "itself" in page
    samples = int(re.findall(r"(\d+) samples", text)[0])
    least = 3 * 2 / 2**samples  # of the 3 pairs beside "itself", 2 of all choices of signs
    assert f"(the least it can be is {least:.3f})" in page
    assert page.count("<polyline") == 8
    before = (tmp_path / "found" / "rows" / "part-00000.parquet").read_bytes()
    code, out, err = run("benchmark", "faithfulness", *options, "--out", "found")
    assert code == 0, err
    assert (tmp_path / "found" / "rows" / "part-00000.parquet").read_bytes() == before
    record = json.loads((tmp_path / "found" / "run.json").read_text(encoding="utf-8"))
    assert record["settings"]["perturbation"] == "attention-mask"
    assert record["settings"]["read_out"] == "logit,log-probability"
    code, out, err = run("benchmark", "faithfulness", *options[:-1], 6, "--out", "found")
    assert code == 2
    assert "steps was 5 and is 6 now" in err


@pytest.mark.parametrize("ways", ["attention-mask,delete", "attention-mask,zero-embedding", "delete"])
def test_the_report_says_where_the_token_that_is_read_at_is_hidden_by_none(run, tmp_path, ways):
    options = ["--data", plain(tmp_path, TEXTS[:2]), "--methods", "lrp", "--metrics", "AOPC Δ", "--perturbation", ways]
    code, _, err = run("benchmark", "loo", *options, "--out", tmp_path / "out")
    assert code == 0, err
    for row in pl.read_parquet(tmp_path / "out/rows/*.parquet").to_dicts():
        assert (row["position"] in row["hideable"]) == ("delete" not in ways)
    for name in ("report.html", "table.md"):
        said = "that each of them may: beside delete" in (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert said == (ways == "attention-mask,delete")


def test_a_run_can_be_made_again_from_its_spec(classifier, tmp_path):
    made = Run(Faithfulness(table(tmp_path)), classifier, ["lrp"], ["AOPC Δ"], part=2)
    again = Run.from_spec(json.loads(json.dumps(made.spec)), model=classifier)
    for number in (2, 0, 1):
        assert again.part(number).equals(made.part(number))


def test_loo_takes_the_metrics_of_its_paper(classifier, tmp_path):
    found = Run(LeaveOneOutAgreement(table(tmp_path)), classifier)
    assert [metric.name for metric in found.metrics] == [
        "LOO Pearson",
        "LOO Spearman",
        "AOPC LeRF",
        "AOPC MoRF",
        "AOPC Δ",
    ]
    assert find("loo") is LeaveOneOutAgreement
    usual = [metric.name for metric in Run(Faithfulness(table(tmp_path)), classifier).metrics]
    assert set(usual) < set(PERTURBATION_METRICS)
    assert "RISE" in usual


def test_a_metric_of_ones_own_is_in_the_default_and_in_the_reports(classifier, tmp_path):
    try:

        @perturbation_metric(
            "Half[b]", "loss without the first half.", lambda asked: np.arange(len(asked))[None] * 2 < len(asked)
        )
        def half(asked, values):
            return asked.full - values[0]

        made = Run(Faithfulness(table(tmp_path)), classifier, NAMES)
        assert "Half[b]" in [metric.name for metric in made.metrics]
        with keep(made, tmp_path / "out") as kept:
            kept.explain()
            made.benchmark.report(kept.store)
    finally:
        PERTURBATION_METRICS._found.pop("Half[b]", None)
    assert "Half[b] ↑" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "loss without the first half." in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------- the summary


class Fixed(Method):
    """Another method's relevance, by a factor."""

    def __init__(self, name, method, factor):
        self.name, self.method, self.factor = name, method, factor

    def describe(self):
        return f"{self.factor} {self.method.describe()}"

    def attribute(self, model, questions, *, ledger=False):
        found = self.method.attribute(model, questions)
        return Found(found.answers, tuple(self.factor * each for each in found.relevance))


def summary_of(classifier, tmp_path, methods, metrics=("AOPC Δ", "ΔA flipping", "RISE"), **options):
    made = Run(Faithfulness(table(tmp_path), **options), classifier, methods, list(metrics))
    with keep(made, tmp_path / "out") as kept:
        kept.explain()
    return summarise(Store.read(tmp_path / "out")), rows_of(made)


def test_the_summary_by_hand(classifier, tmp_path):
    found, rows = summary_of(classifier, tmp_path, [*NAMES, "leave-one-out"])
    for variant, table_ in found.scores.items():
        for method, score in table_.items():
            values = [row[f"{variant}/{method}"] for row in rows]
            assert score.mean == pytest.approx(np.mean(values))
            assert score.low <= score.mean <= score.high
    assert found.correct == (sum(row["correct"] for row in rows), 5)
    wanted = []
    for row in rows:
        one = [row[f"AOPC Δ/{method}"] for method in found.methods]
        other = [-row[f"RISE/{method}"] for method in found.methods]
        wanted.append(twins.pearson(twins.rank(one), twins.rank(other)))
    assert found.agreement["AOPC Δ"]["RISE"] == pytest.approx(np.mean(wanted), abs=1e-9)
    orders = [len({row[f"ΔA flipping/{method}"] for method in found.methods}) > 1 for row in rows]
    assert any(orders)  # where all methods flip alike, nothing is ordered, and the sample counts as 0
    assert found.agreement["ΔA flipping"]["ΔA flipping"] == pytest.approx(np.mean(orders))
    ranks = {method: [] for method in found.methods}
    for variant in found.variants:
        means = [variant.metric.sign * found.scores[variant.name][method].mean for method in found.methods]
        for method, place in zip(found.methods, twins.rank([-mean for mean in means]), strict=True):
            ranks[method].append(place)
    assert found.verdict.ranks == pytest.approx({method: np.mean(each) for method, each in ranks.items()})
    assert found.verdict.method == min(ranks, key=lambda method: np.mean(ranks[method]))


@pytest.mark.parametrize("width", [40, 60, 80, 300])
def test_no_number_is_cut_off_in_a_terminal(width, classifier, tmp_path):
    found, _ = summary_of(classifier, tmp_path, [*NAMES, "gradient-l1", "random", "position"])
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal(found))
    table = captured.get().partition("Recommended")[0].partition("Nothing to recommend")[0]
    assert "…" not in table
    assert max(map(cell_len, table.splitlines())) <= width
    lines = [line for line in table.splitlines() if line.startswith("│ ΔA flipping")]
    cells = [cell.strip() for line in lines for cell in line.split("│")[2:-1]]
    assert cells == [figure(found.scores["ΔA flipping"][method].mean) for method in found.methods]
    assert (len(lines) == 1) == (width == 300)


@pytest.mark.parametrize("width", [22, 40, 60])
def test_a_name_of_several_ways_is_folded_sooner_than_a_number(width, classifier, tmp_path):
    ways = {"perturbation": "attention-mask,zero-embedding", "read_out": "logit,probability"}
    found, _ = summary_of(classifier, tmp_path, [*NAMES, "random"], **ways)
    seen = []
    for wide in (400, width):
        console = Console(width=wide, force_terminal=False)
        with console.capture() as captured:
            console.print(terminal(found))
        seen.append(sorted(re.findall(r"−?\b\d+\.\d{2,3}\b", captured.get())))
    assert max(map(cell_len, captured.get().splitlines())) <= width
    assert "…" not in captured.get()
    assert seen[0] == seen[1]


def test_the_verdict(classifier, tmp_path):
    """Of many texts, or of few: what is told apart is recommended, what knows nothing never is."""
    texts = [
        f"{a} {b} are {c}." for a in ("The keys", "The boys") for b in ("near", "to", "on") for c in ("tall", "old")
    ]
    labels = ["0"] * len(texts)

    def leads(methods, name, count=12):
        (tmp_path / name).mkdir()
        made = Run(Faithfulness(table(tmp_path / name, texts[:count], labels[:count])), classifier, methods, ["AOPC Δ"])
        with keep(made, tmp_path / name / "out") as kept:
            kept.explain()
        found = summarise(Store.read(tmp_path / name / "out"))
        return found, " ".join(verdict(found))

    good = METHODS["leave-one-out"]
    opposite = Fixed("opposite", good, -1)
    for order in ([good, opposite], [opposite, good]):
        found, said = leads(order, order[0].name)
        assert found.verdict.method == "leave-one-out"
        assert (found.verdict.apart, found.verdict.leads, found.verdict.level) == (1, 1, 0)
        assert said.startswith("Recommended: leave-one-out. ")
        assert "over the one metric that says something of it" in said
        assert "add random, and position for texts or centre for images" in " ".join(said.split())
    _, said = leads([good, opposite], "few", 2)
    assert said.startswith("Nothing to recommend yet")
    _, said = leads([Fixed("random", good, 1), opposite], "chance")
    assert said.startswith("Believe none of these")
    found, said = leads([good, Fixed("random", good, -1)], "over")
    assert found.verdict.over == {"random": 1}
    assert "It is better than random, and told apart, by 1 of these metrics." in said
    found, said = leads([good, Fixed("same", good, 1)], "same")
    assert found.verdict.level_ranks == ["same"]
    assert found.rank("AOPC Δ", "same") == 0
    assert "as same has" in said


def test_a_metric_that_contradicts_itself_is_seen(classifier, tmp_path):
    try:
        perturbation_metric("Against", "AOPC Δ upside down.", PERTURBATION_METRICS["AOPC Δ"].plan)(
            lambda asked, values: -PERTURBATION_METRICS["AOPC Δ"].measure(asked, values)
        )
        found, rows = summary_of(classifier, tmp_path, NAMES, ["AOPC Δ", "Against"])
    finally:
        PERTURBATION_METRICS._found.pop("Against", None)
    variant = next(name for name in found.scores if name.startswith("AOPC Δ"))
    orders = [len({row[f"{variant}/{method}"] for method in NAMES}) > 1 for row in rows]  # else all are level
    assert sum(orders) > 1
    assert found.agreement[variant]["Against"] == pytest.approx(-np.mean(orders))


def test_two_methods_have_no_order_to_agree_about(classifier, tmp_path):
    found, _ = summary_of(classifier, tmp_path, NAMES[:2])
    assert {value for row in found.agreement.values() for value in row.values()} == {None}


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"perturbation": "burn"}, InputError, "there is no perturbation 'burn'"),
        ({"perturbation": ","}, InputError, "perturbation is ','; name one or more"),
        ({"perturbation": "unk,unk"}, InputError, "each once"),
        ({"read_out": "odds"}, InputError, "nothing is called 'odds'"),
        ({"read_out": "squared-error"}, InputError, "choose of logit, probability, log-probability$"),  # less is better
        ({"steps": 0}, InputError, "a curve of 0 steps is none"),
        ({"context": 0}, InputError, "context is 0; give at least 1"),
        ({"limit": 0}, InputError, "limit is 0; give at least 1"),
        ({"target": "sad"}, TargetError, "no class 'sad'; name one of 'negative', 'positive', 'mixed' with --target$"),
        ({"text": "body"}, DataError, "has no column 'body'"),
    ],
)
def test_bad_options(options, error, match, classifier, tmp_path):
    with pytest.raises(error, match=match):
        Run(Faithfulness(table(tmp_path), **options), classifier, ["lrp"]).samples  # noqa: B018


def test_leave_one_out_by_another_name_is_not_compared_with_itself(bundled, tmp_path):
    method = LeaveOneOut("mine", batch_size=3)
    with pytest.raises(MethodError, match="mine is leave-one-out by another name, which LOO Pearson would compare"):
        Run(Faithfulness(table(tmp_path)), bundled, ["lrp", method], ["RISE", "LOO Pearson"])
    Run(Faithfulness(table(tmp_path)), bundled, ["lrp", method, "leave-one-out"], ["RISE"])


def test_a_target_of_several_tokens_is_told_what_this_command_takes(bundled, tmp_path):
    with pytest.raises(TargetError, match=r"the target 'zzzqq foo' is \d tokens: .*; name one token with --target$"):
        Run(Faithfulness(table(tmp_path), target="zzzqq foo"), bundled, ["lrp"]).samples  # noqa: B018


def test_a_column_of_labels_that_was_named_and_is_not_there(classifier, tmp_path):
    data = table(tmp_path, TEXTS[:2], ["positive", "negative"])
    with pytest.raises(DataError, match=r"texts.tsv has no label in a column 'mood'; name the column .* with --label"):
        Run(Faithfulness(data, label="mood"), classifier, ["lrp"]).samples  # noqa: B018


def test_labels_the_model_does_not_have(classifier, tmp_path):
    for label in ("angry", "3", "-1"):
        data = table(tmp_path, TEXTS[:2], ["positive", label])
        with pytest.raises(
            DataError,
            match=rf"texts.tsv:3 has the label '{label}', which is not one of the model's classes: .*or its number$",
        ):
            Run(Faithfulness(data), classifier, ["lrp"]).samples  # noqa: B018
    data = table(tmp_path, TEXTS[:2], ["positive", ""])
    assert [row["correct"] is None for row in rows_of(Run(Faithfulness(data), classifier, ["lrp"], ["RISE"]))] == [
        False,
        True,
    ]
    with pytest.raises(DataError, match=r"texts.tsv:3 has no label in the column 'label', which is to be explained"):
        Run(Faithfulness(data, target="label"), classifier, ["lrp"]).samples  # noqa: B018


def test_scores_are_no_classes_of_a_model_of_one_score(piece_tokenizer, tmp_path):
    model = BoundModel(tiny.bert_classifier(vocab_size=len(piece_tokenizer), num_labels=1), piece_tokenizer)
    data = table(tmp_path, TEXTS[:2], ["3.5", "0"])
    rows = rows_of(Run(Faithfulness(data), model, ["lrp"], ["AOPC Δ"]))
    assert [(row["label"], row["correct"]) for row in rows] == [(None, None)] * 2
    with pytest.raises(DataError, match=r"texts.tsv:2 has the label '3.5', which is not one of the model's classes"):
        Run(Faithfulness(data, target="label"), model, ["lrp"]).samples  # noqa: B018


def test_texts_that_are_too_short_or_too_long(classifier, bundled, tmp_path):
    data = table(tmp_path, ["the", TEXTS[0] * 20, *TEXTS[:1]], ["0", "1", "2"])
    made = Run(Faithfulness(data), classifier, ["lrp"])
    assert [each.reason for each in made.samples.dropped] == [
        "has 1 token that may be hidden, and an order needs 2",
        f"has {len(classifier.tokenizer(TEXTS[0] * 20)['input_ids'])} tokens, more than the model’s context of 64",
    ]
    cut = Run(Faithfulness(data, context=6), classifier, ["lrp"]).samples
    assert [len(each.row.tokens.ids) for each in cut.kept] == [6, 6]
    with pytest.raises(InputError, match=r"none of the 1 texts in texts.tsv can be used, the first because it has 1"):
        Run(Faithfulness(table(tmp_path, ["the"], ["0"])), classifier, ["lrp"]).samples  # noqa: B018
    with pytest.raises(InputError, match="can be used, the first because it has"):
        Run(Faithfulness(plain(tmp_path, ["x"])), bundled, ["lrp"]).samples  # noqa: B018


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("before", [None, {"max_length": 9, "direction": "left", "stride": 0}])
def test_a_context_is_the_first_tokens_whichever_side_the_tokenizer_cuts(
    classifier, bundled, tmp_path, monkeypatch, side, before
):
    for model in (classifier, bundled):
        tokenizer = model.reader.text_tokenizer
        whole = tokenizer(TEXTS[2])["input_ids"]
        monkeypatch.setattr(tokenizer, "truncation_side", side)
        backend = tokenizer.backend_tokenizer
        backend.no_truncation() if before is None else backend.enable_truncation(**before)
        was = backend.truncation
        benchmark = Faithfulness(table(tmp_path), context=6)
        ids, _ = benchmark._ids(TEXTS[2], model)
        wanted = [*whole[:5], whole[-1]] if model is classifier else whole[:7]
        assert ids == wanted
        with pytest.raises((TypeError, ValueError)):
            benchmark._ids(b"no text", model)
        assert (tokenizer.truncation_side, backend.truncation) == (side, was)
        backend.no_truncation()


def test_models_and_metrics_that_do_not_fit(classifier, bundled, tmp_path):
    with pytest.raises(InputError, match="has no mask token"):
        Run(Faithfulness(plain(tmp_path), perturbation="mask-token"), bundled, ["lrp"])
    with pytest.raises(InputError, match="there is no metric 'PG2'; the metrics are LOO Pearson"):
        Run(Faithfulness(plain(tmp_path)), bundled, ["lrp"], ["PG2"])
    with pytest.raises(ModelError, match="is a token classifier, and faithfulness asks a"):
        Run(Faithfulness(plain(tmp_path)), BoundModel(tiny.build(transformers.BertForTokenClassification,
            transformers.BertConfig(**tiny.SIZES))), ["lrp"])  # fmt: skip
    with pytest.raises(MethodError, match="no method 'nothing'"):
        Run(Faithfulness(plain(tmp_path)), bundled, ["nothing"])
    kind = "multi_label_classification"
    many = tiny.bert_classifier(vocab_size=len(classifier.tokenizer), problem_type=kind)
    for metrics, mend in (
        (["RISE"], 'read the logit, as by --metrics "ΔA flipping"'),
        (["RISE", "LOO Pearson", "AU-MSE pruning", "MAS"], 'logit, as by --metrics "LOO Pearson,AU-MSE pruning"'),
    ):
        made = Run(Faithfulness(table(tmp_path)), BoundModel(many, classifier.tokenizer), ["lrp"], metrics)
        with pytest.raises(TargetError, match=f"no classes that exclude each other .*{mend}$"):
            made.part(0)


def test_bad_input_on_the_command_line_is_one_line(run, tmp_path):
    data = plain(tmp_path)
    for options, match in (
        (["--perturbation", "burn"], "there is no perturbation 'burn'"),
        (["--data", tmp_path / "none.txt"], "cannot read"),
        (["--metrics", "PG2"], "there is no metric 'PG2'"),
        (["--perturbation", "mask-token", "--methods", "lrp"], "has no mask token"),
        (["--methods", "lrp", "--metrics", "RISE", "--show", "none"], "there is no sample 'none'"),
    ):
        read = [] if "--data" in options else ["--data", data]
        code, _, err = run("benchmark", "faithfulness", *read, *options, "--out", tmp_path / "out")
        assert code == 2
        assert match in err
        assert "Traceback" not in err
        assert len(err.strip().splitlines()) <= 3
        assert not list(tmp_path.glob("out/rows/*"))  # before anything is explained


def test_names_with_spaces_between_are_the_same_run(tmp_path):
    data = plain(tmp_path)
    close, wide = (
        Faithfulness(
            data, perturbation=f"attention-mask,{gap}zero-embedding", read_out=f"logit,{gap}probability"
        ).settings()
        for gap in ("", " ")
    )
    assert close == wide


def test_a_folder_of_another_kind_is_no_run_of_this_one(tmp_path):
    with Store.begin(tmp_path / "a", "sva", {"model": "m", "methods": ["a"], "metrics": []}, {}) as store:
        store.note()
    with pytest.raises(ResultFileError, match="does not hold a run that hides tokens"):
        summarise(Store.read(tmp_path / "a"))


# ----------------------------------------------------------------------------------- encoder-decoders


@pytest.fixture
def copier(piece_tokenizer):
    """An encoder and a decoder, with a tokenizer that puts special tokens around a text."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=len(piece_tokenizer), pad_token_id=0, **sizes)
    return BoundModel(tiny.build(transformers.T5ForConditionalGeneration, config), piece_tokenizer)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_asked_for_the_next_token(copier, tmp_path):
    """The encoder's tokens are hidden, and what the decoder has written so far is read."""
    data = tmp_path / "asked.jsonl"
    texts, written = TEXTS[1::2], ["the keys", ""]
    rows = [{"text": t, "label": "are tall", "written": w} for t, w in zip(texts, written, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = Run(Faithfulness(data, decoder="written", steps=3, context=7), copier, NAMES[:2], list(PERTURBATION_METRICS))
    found, tokenizer = rows_of(run), copier.tokenizer
    for row, text, so_far in zip(found, texts, written, strict=True):
        ids = tokenizer(text, truncation=True, max_length=7)["input_ids"]
        decoder = [0, *tokenizer(so_far, add_special_tokens=False)["input_ids"]]
        assert row["hideable"] == list(range(1, len(ids) - 1))
        assert len(row["tokens"]) == len(ids) + len(decoder)
        assert row["position"] == len(decoder) - 1
        assert row["label"] == copier.label(tokenizer("are", add_special_tokens=False)["input_ids"][0])
        assert row["relevance/lrp"][len(ids)] != 0

        class Decoding(torch.nn.Module):
            """What the decoder says with this text behind it."""

            def forward(self, decoder=decoder, **given):
                return copier.module(**given, decoder_input_ids=torch.tensor([decoder]))

        read = ("logit", "log-probability")
        check([row], Decoding(), lambda _, ids=ids: ids, lambda logits, _: logits[-1], False, 3, read)


def test_what_an_encoder_and_a_decoder_are_asked_for(copier, classifier, tmp_path):
    labels = ["are tall", "is", "are", "is", "girl"]
    data = table(tmp_path, TEXTS, labels)
    run = Run(Faithfulness(data, target="label"), copier, ["lrp"], ["ΔA flipping"])
    begins = [copier.tokenizer(label, add_special_tokens=False)["input_ids"][0] for label in labels]
    assert [row["explained"] for row in rows_of(run)] == [f"logit of {copier.label(token)!r}" for token in begins]
    for way in ("zero-embedding", "unk", "delete"):
        other = Run(Faithfulness(data, target="label", perturbation=way), copier, ["lrp"], ["ΔA flipping"])
        moved = [row["ΔA flipping [logit]/lrp"] for row in rows_of(other)]
        assert np.ptp(moved) > 0
    with pytest.raises(DataError, match=r"texts.tsv:2 has no column 'said', only 'text', 'label'.*with --decoder"):
        Run(Faithfulness(data, decoder="said"), copier, ["lrp"]).samples  # noqa: B018
    with pytest.raises(ModelError, match="BertForSequenceClassification has no decoder of its own; leave --decoder"):
        Run(Faithfulness(data, decoder="label"), classifier, ["lrp"])
    with pytest.raises(
        DataError, match=r"texts.tsv:2 has the label '電', which the model's tokenizer has no token for"
    ):
        Run(Faithfulness(table(tmp_path, TEXTS, ["電", *labels[1:]])), copier, ["lrp"]).samples  # noqa: B018
