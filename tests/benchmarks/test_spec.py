"""A part is a pure function of a run's spec: other processes make the same parts from it, or refuse."""

from __future__ import annotations

import functools
import importlib
import json
import operator
import re
import subprocess
import sys
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lrpx
from lrpx._defined import digest_of_code, digest_of_model
from lrpx.benchmarks import BENCHMARKS, Run, find, keep
from lrpx.benchmarks._agreement import Agreement
from lrpx.errors import DataError, InputError, MethodError, ModelError, ResultFileError
from lrpx.methods import AltiLogit
from lrpx.metrics import Metric
from lrpx.metrics._ground_truth import METRICS
from lrpx.model import Spec
from lrpx.runs import read_table
from tests.reference import models

SENTENCES = Path(__file__).parent / "data" / "sentences.conllu"
METHODS = ["attnlrp", "alti-logit"]
WORKER = """
import json, sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
import torch
from lrpx.benchmarks import Run
from lrpx.runs import write_table
torch.set_num_threads(1)
spec, folder, *numbers = sys.argv[1:]
run = Run.from_spec(json.loads(Path(spec).read_text()))
for number in map(int, numbers):
    write_table(Path(folder) / f"{number}.parquet", run.part(number), run.digest)
"""


@pytest.fixture(scope="module")
def run():
    return Run(Agreement([SENTENCES], limit=12), Spec().build(), METHODS, ["RMA", "PG2"], part=3, batch_size=2)


@pytest.fixture
def spec(run):
    """As a file would hold it."""
    return json.loads(json.dumps(run.spec))


@pytest.mark.slow
def test_two_other_processes_make_the_same_bytes_in_another_order(run, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps(run.spec))
    assert run.parts == 4
    with keep(run, tmp_path / "whole") as kept:
        kept.explain()
        whole = {path: kept.store.part(path.stem.removeprefix("part-"), run.columns) for path in kept.store.parts()}
    for numbers in (["3", "1"], ["2", "0"]):
        command = [sys.executable, "-c", WORKER, str(tmp_path / "spec.json"), str(tmp_path), *numbers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
        assert done.returncode == 0, done.stderr
    for number, path in enumerate(whole):
        assert (tmp_path / f"{number}.parquet").read_bytes() == path.read_bytes(), number
    assert sum(map(len, whole.values())) == len(run) == 12
    assert len({tuple(each["id"].to_pylist()) for each in whole.values()}) == 4


SCRIPT = """
from dataclasses import dataclass
from lrpx.benchmarks import register
from lrpx.benchmarks._agreement import Agreement
from lrpx.metrics._ground_truth import metric

@register
@dataclass(frozen=True)
class Mine(Agreement):
    name = "mine"

@metric("First", "whether the first token is positive.")
def first(relevance, truth):
    return float(relevance[0] > 0)
"""


@pytest.mark.slow
def test_what_a_script_brings_is_found_by_another_process(tmp_path, monkeypatch):
    for registry in (BENCHMARKS, METRICS):
        monkeypatch.setattr(registry, "_found", dict(registry))
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    own = Run(find(str(script))([SENTENCES], limit=2), Spec().build(), ["lrp"], [str(script)])
    assert own.columns.names[-1] == "First/random"
    (tmp_path / "spec.json").write_text(json.dumps(own.spec))
    command = [sys.executable, "-c", WORKER, str(tmp_path / "spec.json"), str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    assert read_table(tmp_path / "0.parquet", own.columns, own.digest).equals(own.part(0))


def test_a_script_that_was_edited_is_another_one(tmp_path, monkeypatch):
    for registry in (BENCHMARKS, METRICS):
        monkeypatch.setattr(registry, "_found", dict(registry))
    benchmark, at, metric = SCRIPT.partition("@metric")
    head = "from lrpx.metrics._ground_truth import metric\n"
    scripts = {"benchmark mine": ("mine.py", benchmark), "metric First": ("first.py", head + at + metric)}
    model = Spec().build()

    def run():
        return Run(find(str(tmp_path / "mine.py"))([SENTENCES], limit=2), model, ["lrp"], [str(tmp_path / "first.py")])

    for what, (edited, content) in scripts.items():
        for name, text in scripts.values():
            (tmp_path / name).write_text(text)
        out, before = tmp_path / f"of {edited}", run()
        with keep(before, out) as kept:
            kept.explain()
        assert run().settings == before.settings
        (tmp_path / edited).write_text(content.replace("> 0", "< 0") + "x = 1\n")
        with (
            pytest.raises(ResultFileError, match=f"another setting: script of the {what} was .* and is .* now"),
            keep(run(), out),
        ):
            pass
        with pytest.raises(ResultFileError, match=f"the spec has another script of the {what} than what is found here"):
            Run.from_spec(before.spec, model=model)


OWN = """
from helping import last
from lrpx.metrics import metric
FACTOR = 1.0
SEEN = []
class Share:
    def __call__(self, relevance, truth):  # of the last token
        SEEN.append(1)
        return FACTOR * float(last(relevance) > 0) / 4
metric("Last", "is the last token relevant?")(Share())
"""
HELPING = """
import functools
@functools.cache
def at():
    return -1
def last(relevance):
    return relevance[at()]
"""


def test_what_a_module_defines_is_known_by_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr(METRICS, "_found", dict(METRICS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    files = {
        "mine_of_the_spec": OWN,
        "helping": HELPING,
    }
    model = Spec().build()

    def run(**edited):
        for name, text in (files | edited).items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        importlib.import_module("mine_of_the_spec")
        return Run(Agreement([SENTENCES], limit=2), model, ["lrp"], ["RMA", "Last"])

    before = run()
    assert [name for name in before.settings if name.startswith(("code", "script"))] == ["code of the metric Last"]
    with keep(before, tmp_path / "out") as kept:
        kept.explain()
    assert run(mine_of_the_spec=OWN.replace("# of", "# of the text,")).settings == before.settings
    for name, text, other in (
        ("mine_of_the_spec", "> 0", "< 0"),
        ("mine_of_the_spec", "FACTOR = 1.0", "FACTOR = 2.0"),
        ("helping", "return -1", "return -2"),
    ):
        after = run(**{name: files[name].replace(text, other)})
        with (
            pytest.raises(ResultFileError, match="another setting: code of the metric Last"),
            keep(after, tmp_path / "out"),
        ):
            pass


class Scaled(torch.nn.Module):
    """A model of one's own around another."""

    def __init__(self, inner, scale):
        super().__init__()
        self.inner, self.scale = inner, scale

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return self.inner(input_ids, attention_mask=attention_mask, position_ids=position_ids).logits * self.scale


def test_a_model_of_ones_own_is_known_by_its_numbers(tmp_path):
    """Not by its weights alone: nothing else says that its logits are twice what they were."""
    spec = Spec().build()

    def run(scale):
        model = lrpx.model.BoundModel(Scaled(spec.module, scale).eval(), spec.tokenizer, task=lrpx.Task.CAUSAL)
        return Run(Agreement([SENTENCES], limit=2), model, ["lrp"], ["RMA"])

    with keep(run(1.0), tmp_path) as kept:
        kept.explain()
    assert run(1.0).settings == run(1.0).settings
    with pytest.raises(ResultFileError, match="another setting: code of the model was"), keep(run(2.0), tmp_path):
        pass


def test_a_run_is_known_by_what_its_operations_are_cast_to():
    """Else a run in float32 would go on with rows of eight bits."""
    run = Run(Agreement([SENTENCES], limit=2), Spec().build(), ["lrp"], ["RMA"])
    with torch.autocast("cpu", torch.bfloat16):
        other = Run(Agreement([SENTENCES], limit=2), run.model, ["lrp"], ["RMA"])
        assert other.settings["dtype"] == "float32, autocast to bfloat16"
    assert run.settings["dtype"] == "float32"


class Holding(torch.nn.Module):
    def __init__(self, **held):
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


@dataclass(slots=True)
class Sized:
    size: int


def halved(x):
    return x / 2


def doubled(x):
    return x * 2


def counting(*sizes):
    return lambda x: x in sizes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 0.5), (1, 2.0)),
        ([1, 3], [1, 4]),
        ([[1, 3], [2]], [[1, 4], [2]]),
        (np.float32(1), np.float32(2)),
        ({"scale": 1.0}, {"scale": 2.0}),
        ({"scale": 1.0, "widths": [1]}, {"scale": 2.0, "widths": [1]}),  # as YAML has it
        ({"attention": {"scale": 1.0}}, {"attention": {"scale": 2.0}}),
        ({"scale": 1.0, "table": torch.ones(1)}, {"scale": 2.0, "table": torch.ones(1)}),
        (SimpleNamespace(size=1, widths=[1]), SimpleNamespace(size=2, widths=[1])),
        (Sized(1), Sized(2)),
        (SimpleNamespace(size=1), SimpleNamespace(size=2)),
        (halved, doubled),
        (torch.relu, torch.tanh),
        (torch.nn.ReLU(), torch.nn.GELU()),
        (torch.nn.LeakyReLU(0.1), torch.nn.LeakyReLU(0.2)),
        (torch.nn.LayerNorm(2, eps=1e-5), torch.nn.LayerNorm(2, eps=1e-2)),
        (torch.nn.MultiheadAttention(4, 1), torch.nn.MultiheadAttention(4, 2)),
    ],
)
def test_a_model_is_known_by_all_that_it_holds(one, other):
    """The modules of torch in it are no code of one's own, but what they are tells what the model says."""
    first, again, second = (digest_of_model(Holding(held=each)) for each in (one, one, other))
    assert first == again != second


def test_a_model_is_known_by_the_functions_that_stand_on_it_and_by_no_tensor():
    layer = torch.nn.Linear(2, 2)
    assert digest_of_model(layer) is None
    with_hook = []
    for hook in (lambda *given: given[-1] * 2, lambda *given: given[-1] * 3):
        handle = layer.register_forward_hook(hook)
        with_hook.append(digest_of_model(layer))
        handle.remove()
    assert None not in with_hook
    assert len(set(with_hook)) == 2
    assert digest_of_model(Holding(map=None)) == digest_of_model(Holding(map=torch.ones(2)))


def scaled(module, given, out, by=1.0):
    return out * by


class Scaling:
    def __init__(self, by):
        self.by = by

    def __call__(self, module, given, out):
        return out * self.by


@pytest.mark.parametrize(
    ("one", "other"),
    [(functools.partial(scaled, by=2.0), functools.partial(scaled, by=3.0)), (Scaling(2.0), Scaling(3.0))],
)
def test_a_model_is_known_by_hooks_and_forwards_with_settings_of_their_own(one, other):
    """A partial function and an object that is called are as usual as a plain function."""
    found = []
    for hook in (one, other):
        layer = torch.nn.Linear(2, 2)
        layer.register_forward_hook(hook)
        found.append(digest_of_model(layer))
    for forward in (one, other):
        layer = torch.nn.Linear(2, 2)
        layer.forward = forward
        found.append(digest_of_model(layer))
    assert None not in found
    assert len(set(found)) == 4


def attention(module, query, key, value, mask, **more):
    return value.transpose(1, 2), None


def test_a_model_of_transformers_is_known_by_what_was_put_into_its_classes_and_told_to_transformers(monkeypatch):
    llama = models.tiny_llama()
    mlp, home = type(llama.model.layers[0].mlp), sys.modules[type(llama).__module__]
    found = [digest_of_model(llama)]
    with monkeypatch.context() as patch:
        plain = mlp.forward
        patch.setattr(mlp, "forward", functools.wraps(plain)(lambda self, x: plain(self, x) * 2))
        found.append(digest_of_model(llama))
    with monkeypatch.context() as patch:
        patch.setattr(home, "rotate_half", lambda x: -x)
        found.append(digest_of_model(llama))
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", attention)
        patch.setattr(llama.config, "_attn_implementation_internal", "mine")
        found.append(digest_of_model(llama))
    with monkeypatch.context() as patch:
        of_torch = torch.nn.functional.scaled_dot_product_attention
        doubled = lambda *given, **more: of_torch(*given, **more) * 2  # noqa: E731
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", doubled)
        found.append(digest_of_model(llama))
    assert len(set(found)) == 5
    assert digest_of_model(llama) == found[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((halved, doubled, halved), (halved, doubled, doubled)),  # which of those that were met before
        (((1, 2), (3, 4), (1, 2)), ((1, 2), (3, 4), (3, 4))),
        ((1, (2, 3)), ((1, 2), 3)),
        ((Sized(1),), (Sized(2),)),
        ((torch.float32, torch.relu), (torch.float32, torch.tanh)),
        ((re.compile("a" * 300 + "b"),), (re.compile("a" * 300 + "c"),)),
        ((re.compile("a"),), (re.compile("a", re.IGNORECASE),)),
        ((np.mean,), (np.median,)),
        ((np.exp,), (np.tanh,)),
        ((Path("one"), Decimal("0.1")), (Path("one"), Decimal("0.2"))),
        ((operator.itemgetter(0),), (operator.itemgetter(1),)),
    ],
)
def test_code_is_known_by_what_it_holds_each_time(one, other):
    assert digest_of_code(counting(*one)) == digest_of_code(counting(*one)) != digest_of_code(counting(*other))


def one_of(value):
    """A new class each time, as another process has it, with functions elsewhere in memory."""

    class Kind(Enum):
        ONE = value

    return counting(Kind.ONE)


@pytest.mark.parametrize("wrapped", [functools.partial, lambda function: (function, 1)])
def test_code_is_known_by_what_the_members_of_an_enum_are_not_by_where_these_lie(wrapped):
    def found(function):
        return digest_of_code(one_of(wrapped(lambda x: function(x))))

    assert found(np.exp) == found(np.exp) != found(np.tanh)


class Least:
    """A measure with settings, that counts its calls and keeps what it has made."""

    def __init__(self, least, words=()):
        self.least, self.words, self.calls, self.made = least, list(words), 0, {}

    def __call__(self, relevance, truth):
        self.calls += 1
        self.made[self.calls] = torch.ones(1)
        return float(self.least * len(self.words) + len(self.table))

    @functools.cached_property
    def table(self):
        return [*self.words]


def least(relevance, truth, least=0, words=()):
    return float(least * len(words))


def within(least):
    return lambda relevance, truth: float(len(least))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Least(1), Least(2)),
        (Least(1, ["is"]), Least(1, ["are"])),
        (functools.partial(least, least=1), functools.partial(least, least=2)),
        (functools.partial(least, words=["is"]), functools.partial(least, words=["are"])),
        (within([1]), within([2])),
        (within({"is": [1]}), within({"is": [2]})),
        (within(np.ones(2)), within(np.zeros(2))),
    ],
)
def test_a_metric_is_known_by_the_settings_that_its_measure_holds(one, other):
    metrics = [Metric("Mine", "is it mine?", 0, 1, "higher", each) for each in (one, other)]
    before, second = map(digest_of_code, metrics)
    one(None, None)
    assert digest_of_code(metrics[0]) == before != second


WORDS, WEIGHTS, NAMES = ["is"], {"is": 1.0}, {"is"}


def of_words(x):
    return [WEIGHTS[each] for each in x if each in WORDS or each in NAMES]


@pytest.mark.parametrize(("name", "other"), [("WORDS", ["are"]), ("WEIGHTS", {"is": 2.0}), ("NAMES", {"is", "are"})])
def test_code_is_known_by_the_lists_sets_and_dictionaries_that_it_names(name, other, monkeypatch):
    before = digest_of_code(of_words)
    assert digest_of_code(of_words) == before
    monkeypatch.setitem(globals(), name, other)
    assert digest_of_code(of_words) != before


class Keeping(torch.nn.Module):
    """Scales by a number that it keeps to itself; counts its calls, and keeps how long the last text was."""

    def __init__(self, scale):
        super().__init__()
        self._scale, self.calls, self._last = scale, 0, 0

    def forward(self, x):
        self.calls += 1
        self._remember(len(x))
        return x * self._scale

    def _remember(self, length):
        self._last = length


def test_a_model_is_known_by_what_it_names_itself_and_not_by_what_it_counts():
    model = Keeping(1.0)
    before = digest_of_model(model)
    model(torch.ones(3))
    model._is_initialized = True  # as transformers has flags that say how a model was made
    assert digest_of_model(model) == before != digest_of_model(Keeping(2.0))


def test_a_tuple_of_another_process_need_not_be_the_same_object():
    parts = [1, 2]
    assert digest_of_code(counting(tuple(parts), tuple(parts))) == digest_of_code(counting(*[tuple(parts)] * 2))


def test_a_part_is_the_same_again_and_in_any_order(run):
    first = run.part(1)
    run.part(3)
    assert run.part(1).equals(first)
    for number in (-1, 4):
        with pytest.raises(InputError, match=r"there is no part .* the 12 samples have parts 0 to 3"):
            run.part(number)


def test_the_spec_builds_the_same_run(run, spec):
    again = Run.from_spec(spec)
    assert again.spec == run.spec
    assert again.part(0).equals(run.part(0))


def test_what_is_not_as_the_spec_says_is_refused(spec, tmp_path, monkeypatch):
    other = tmp_path / SENTENCES.name
    other.write_bytes(SENTENCES.read_bytes() + b"\n")
    with pytest.raises(ResultFileError, match="the spec has another data than what is found here"):
        Run.from_spec(spec | {"options": spec["options"] | {"data": [str(other)]}})
    model = Spec().build()
    with torch.no_grad():
        model.module.get_input_embeddings().weight.neg_()
    with pytest.raises(ResultFileError, match="the spec has another weights and config"):
        Run.from_spec(spec, model=model)
    with pytest.raises(ResultFileError, match="the spec has another described"):
        Run.from_spec(spec, methods=["attnlrp", AltiLogit("alti-logit", epsilon=1e-6)])
    with pytest.raises(DataError, match=r"cannot read missing\.conllu"):
        Run.from_spec(spec | {"options": spec["options"] | {"data": ["missing.conllu"]}})
    with pytest.raises(MethodError, match="there is no method 'mine'"):
        Run.from_spec(spec | {"methods": ["mine"]})


@pytest.mark.parametrize("wrong", [{}, {"benchmark": "sva"}, {"options": {"data": [], "speed": 1}}, {"settings": 1}])
def test_what_is_no_spec_is_refused(spec, wrong):
    with pytest.raises(ResultFileError, match="this is no spec of a run"):
        Run.from_spec(wrong if "data" not in str(wrong) and "settings" not in wrong else spec | wrong)


def test_a_model_of_ones_own_is_passed_along(run):
    explainer = lrpx.Explainer(run.model.module, run.model.tokenizer)
    own = Run(Agreement([SENTENCES], limit=12), explainer.bound, METHODS, ["RMA", "PG2"], part=3, batch_size=2)
    assert own.spec["model"] is None
    with pytest.raises(ModelError, match="loaded by no name; pass it"):
        Run.from_spec(own.spec)
    assert Run.from_spec(own.spec, model=explainer.bound).part(2).equals(run.part(2))
