"""A benchmark of another kind than ours, in one file: no ground truth, several questions a sample, asked further."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
import pytest
import torch
from rich.text import Text

from lrpx.benchmarks import BENCHMARKS, Benchmark, Run, Samples, Source, find, keep, register
from lrpx.errors import InputError
from lrpx.methods import METHODS
from lrpx.metrics import Metric
from lrpx.model import Spec
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.tasks import Task

TEXTS = ("The keys to the cabinet", "The boys", "The friend of the girls and the boys by the trees")
VERBS = (" are", " is")


def drop(full, without):
    return full - without


@dataclass(frozen=True)
class Drop(Benchmark):
    """Drop: what does the value lose when a method's first token is hidden?

    The second paragraph is for readers of the code.
    """

    data: Annotated[Path, "A text a line."]
    verbs: Annotated[list[str], "The next words, as often as you like."]
    limit: Annotated[int | None, "So many texts."] = None

    name: ClassVar[str] = "drop"
    tasks = frozenset({Task.CAUSAL})
    metrics: ClassVar = {
        "Drop": Metric("Drop", "the value less that without the token.", -100.0, 100.0, "higher", drop)
    }
    source = pa.schema({"text": pa.string()})
    facts = pa.schema({"id": pa.string()})

    def read(self):
        rows = [{"text": line} for line in self.data.read_text().splitlines()]
        return Source(pa.Table.from_pylist(rows[: self.limit], self.source), (), {"counts": {"read": len(rows)}})

    def samples(self, source, model):
        return Samples([row["text"] for row in source.rows.to_pylist()], (), {"mean": 1.5})

    def facts_of(self, sample):
        return {"id": sample}

    def ask(self, sample, model):
        row = model.reader.row(sample)
        return Questions((row,), tuple(Question(0, len(row.tokens.ids) - 1, Logit(verb)) for verb in self.verbs))

    def columns(self, methods, metrics):
        found = {f"{metric.name}/{method}": pa.list_(pa.float64()) for metric in metrics for method in methods}
        return pa.schema([*self.facts, pa.field("values", pa.list_(pa.float64())), *pa.schema(found)])

    def judge(self, case, model, metrics):
        made = {"values": case.answers.values.tolist()}
        resolved = case.questions.with_targets(case.answers.targets)
        for method, relevance in case.relevance.items():
            masks = [torch.arange(len(each)) != each.argmax() for each in relevance]
            without = model.values(resolved.alone(range(len(resolved))), attention_mask=[m.long() for m in masks])
            pairs = list(zip(made["values"], without.tolist(), strict=True))
            made |= {f"{metric.name}/{method}": [metric(*pair) for pair in pairs] for metric in metrics}
        return made

    def report(self, store, show=()):
        (store.folder / "report.txt").write_text(f"{len(store.checked_parts())} parts")
        return Text("reported")


@pytest.fixture
def drops(tmp_path, monkeypatch):
    """Registered for one test."""
    monkeypatch.setattr(BENCHMARKS, "_found", dict(BENCHMARKS))
    register(Drop)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return tmp_path / "texts.txt"


def test_registered_it_is_a_command(drops, run, tmp_path):
    code, out, _ = run("benchmark", "--help")
    assert code == 0
    assert "Drop: what does the value lose when a method's first token is" in out
    assert "Subject-verb agreement" in out
    code, out, _ = run("benchmark", "drop", "--help")
    assert code == 0
    assert "second paragraph" not in out
    assert all(name in out for name in ("--data", "--verbs", "--limit", "--out", "--methods", "--metrics", "--part"))
    verbs = [each for verb in VERBS for each in ("--verbs", verb)]
    options = ["--data", drops, *verbs, "--methods", "attnlrp,gradient-x-input", "--part", "2"]
    code, out, err = run("benchmark", "drop", *options, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "read: 3" in out
    assert "reported" in out
    assert (tmp_path / "out" / "report.txt").read_text() == "2 parts"
    code, out, err = run("benchmark", "drop", *options, "--limit", 2, "--out", tmp_path / "out")
    assert code == 2
    assert "limit was null and is 2 now" in err


def test_every_question_has_its_own_answer_and_relevance(drops):
    model = Spec().build()
    run = Run(Drop(drops, list(VERBS)), model, ["gradient-x-input"], part=10)
    rows = run.part(0).to_pylist()
    assert [row["id"] for row in rows] == list(TEXTS)
    for row in rows:
        for verb, value, lost in zip(VERBS, row["values"], row["Drop/gradient-x-input"], strict=True):
            ids = model.tokenizer(row["id"], return_tensors="pt")["input_ids"]
            index = model.index(verb)
            embeddings = model.module.get_input_embeddings()(ids).detach().requires_grad_()
            logit = model.module(inputs_embeds=embeddings).logits[0, -1, index]
            assert value == pytest.approx(logit.item(), rel=1e-4)
            first = int((embeddings * torch.autograd.grad(logit, embeddings)[0]).sum(-1).argmax())
            mask = torch.ones_like(ids)
            mask[0, first] = 0
            hidden = model.module(input_ids=ids, attention_mask=mask).logits[0, -1, index]
            assert lost == pytest.approx((logit - hidden).item(), abs=1e-3)


def test_the_spec_holds_its_fields(drops):
    run = Run(Drop(drops, list(VERBS), limit=2), Spec().build(), ["attnlrp"])
    spec = json.loads(json.dumps(run.spec))
    assert spec["options"] == {"data": str(drops), "verbs": list(VERBS), "limit": 2}
    assert spec["settings"]["data"]["file"] == "texts.txt"
    again = Run.from_spec(spec)
    assert again.benchmark == run.benchmark
    assert again.part(0).equals(run.part(0))


def test_without_methods_of_its_own_it_takes_all(drops):
    run = Run(Drop(drops, list(VERBS)), Spec().build())
    assert [method.name for method in run.methods] == [
        name for name, each in METHODS.items() if Task.CAUSAL in each.tasks
    ]


# ------------------------------------------------------------------------------ refusals


class Lacks(Benchmark):
    name = "lacks"


class Untold(Drop):
    name = "untold"
    more: Path = Path()


def test_what_is_no_benchmark_is_refused_when_it_is_registered(drops):
    with pytest.raises(InputError, match="the benchmark Lacks lacks ask, columns, facts_of, judge, read"):
        register(Lacks)
    with pytest.raises(InputError, match=r"the fields of Untold are no options: say what more is: more: Annotated"):
        register(dataclass(frozen=True)(Untold))
    with pytest.raises(InputError, match="is no benchmark; derive it from"):
        register(Path)
    with pytest.raises(InputError, match="there is a benchmark 'sva' already"):
        register(type("Other", (Drop,), {"name": "sva"}))
    ours = "sva circuits faithfulness loo positions layers patching pixels mosaics qa qa-perturbed".split()
    assert set(BENCHMARKS) == {*ours, "drop"}


@pytest.mark.parametrize("name", ["magic", "missing.py"])
def test_an_unknown_benchmark_ends_with_one_line(run, name):
    code, out, err = run("benchmark", name, "--out", "x")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("lrpx: there is no ")


def test_a_script_without_a_benchmark_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match=r"empty\.py has these benchmarks: none; name one of them"):
        find(str(tmp_path / "empty.py"))
    with pytest.raises(InputError, match=r"broken\.py cannot be run \(ZeroDivisionError: .*mend it"):
        find(str(tmp_path / "broken.py"))


def test_what_breaks_the_contract_is_refused(drops, tmp_path):
    model = Spec().build()

    @dataclass(frozen=True)
    class Columns(Drop):
        source = pa.schema({"text": pa.large_string()})

        def read(self):
            return Source(pa.table({"text": ["a"]}))

    with (
        pytest.raises(InputError, match="reads other columns than its source says"),
        keep(Run(Columns(drops, []), model, ["attnlrp"]), tmp_path / "columns"),
    ):
        pass

    for texts, message in (("a b\nc d\na b", "2 samples of drop are called 'a b'"), ("", "no sample of drop is left")):
        drops.write_text(texts)
        with pytest.raises(InputError, match=message):
            len(Run(Drop(drops, list(VERBS)), model, ["attnlrp"]))
    drops.write_text("The boys")

    @dataclass(frozen=True)
    class Rows(Drop):
        def ask(self, sample, model):
            one = super().ask(sample, model)
            return Questions(one.rows * 2, one.asked)

    with pytest.raises(InputError, match="drop asks about 2 rows at once; ask about one a sample"):
        Run(Rows(drops, list(VERBS)), model, ["attnlrp"]).part(0)
