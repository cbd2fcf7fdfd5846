"""A method of one's own, in a script: the explainer, the command line, the benchmark and its report know it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lrpx
from lrpx import Explainer
from lrpx._scripts import digest_of
from lrpx.errors import MethodError, NonFiniteError
from lrpx.methods import METHODS, Backward, Found, Method, find, register
from lrpx.methods._contract import attribute_all
from lrpx.questions import Question, Questions
from lrpx.rules import constant
from tests.reference import models

IDS = [3, 14, 15, 9, 26, 5, 7]
SCRIPT = '''
from dataclasses import dataclass
import torch
from lrpx.methods import Found, Method, register

@register
@dataclass(frozen=True)
class Ramp(Method):
    """The place of each token, times a factor."""
    name: str = "ramp"
    label: str = "Ramp"
    factor: float = 1.0

    def attribute(self, model, questions, *, ledger=False):
        answers = model.ask(questions)
        lengths = [len(questions.row_of(i).tokens.ids) for i in range(len(questions))]
        return Found(answers, tuple(self.factor * torch.arange(float(length)) for length in lengths))
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS, "_found", dict(METHODS))  # what a test registers is not there for others
    monkeypatch.setattr(METHODS, "_origins", dict(METHODS._origins))
    path = tmp_path / "ramp.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.parametrize("how", ["path", "text", "named", "registered", "object"])
def test_in_the_explainer(script, how):
    ramp = find(script)
    given = {"path": script, "text": str(script), "named": f"{script}:ramp", "registered": "ramp", "object": ramp}[how]
    explain = Explainer(models.tiny_gpt2())
    a = explain(IDS, 7, method=given)
    assert a.relevance.tolist() == list(map(float, range(7)))
    assert a.provenance.method == "ramp"
    assert "factor=1.0" in a.provenance.recipe
    many = explain([IDS, IDS[:3]], 7, method=given)
    assert many[1].relevance.tolist() == [0.0, 1.0, 2.0]
    assert many[0].explained.value == pytest.approx(a.explained.value)


def test_on_the_command_line(script, run, tmp_path):
    numbers = tmp_path / "a.json"
    code, out, err = run("explain", "The doors of the house", "--method", script, "--json", numbers)
    assert (code, err) == (0, "")
    assert "ramp" in out
    assert json.loads(numbers.read_text())["parts"]["tokens"]["values"][2] == 2.0


def test_in_the_benchmark_and_its_report(script, run, tmp_path):
    data = Path(__file__).parents[1] / "benchmarks" / "data" / "sentences.conllu"
    out = tmp_path / "agreement"
    code, printed, err = run("benchmark", "sva", "--data", data, "--out", out, "--methods", f"lrp,{script}")
    assert code == 0, err
    assert "Ramp" in printed
    for report in ("table.md", "table.tex", "report.html"):
        assert "Ramp" in (out / report).read_text(encoding="utf-8")
    # a method that describes itself otherwise is another run
    script.write_text(SCRIPT.replace("factor: float = 1.0", "factor: float = 2.0"), encoding="utf-8")
    code, _, err = run("benchmark", "sva", "--data", data, "--out", out, "--methods", f"lrp,{script}")
    assert code == 2
    assert "another setting" in err


def test_a_script_that_was_edited_is_another_one(script, run, tmp_path):
    """Though its method describes itself as before."""
    texts, found, out = tmp_path / "texts.txt", tmp_path / "found.jsonl", tmp_path / "tuned"
    texts.write_text("The doors of the house\nThe boy\n", encoding="utf-8")
    explain = ("explain", "--texts", texts, "--method", script, "--json", found)
    tune = ("tune", "--method", script, "--grid", "factor=1,2", "--data", texts, "--last", "2", "--out", out)
    assert run(*explain)[0] == 0
    code, _, err = run(*tune)
    assert code == 0, err
    script.write_text(SCRIPT.replace("self.factor *", "2 * self.factor *"), encoding="utf-8")
    code, _, err = run(*explain)
    assert code == 2
    assert "holds something else than the results of this run, at line 1; name another file" in err
    code, _, err = run(*tune)
    assert code == 2
    assert "another setting: script of the method ramp" in err
    script.write_text(SCRIPT, encoding="utf-8")
    assert run(*explain)[0] == run(*tune)[0] == 0


def test_a_recipe_that_a_script_registers(script):
    """Of a class of ours, which are no script's for that."""
    script.write_text("from lrpx import LRP\nfrom lrpx.methods import *\nregister(Backward('mine', LRP))\n")
    assert digest_of(find(script)) == digest_of(METHODS["mine"])
    assert digest_of(find(script)) == hashlib.sha256(script.read_bytes()).hexdigest()
    assert digest_of(METHODS["lrp"]) is None


def test_a_module_of_ones_own_that_was_edited_is_another_method(script, run, tmp_path, monkeypatch):
    """A script is known with the modules beside it that it imports, and with those that they import, as they ran."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ramp_package").mkdir()
    deep = tmp_path / "ramp_package" / "deep.py"
    texts, found = tmp_path / "texts.txt", tmp_path / "found.jsonl"
    texts.write_text("The doors of the house\nThe boy\n", encoding="utf-8")
    (tmp_path / "ramp_package" / "__init__.py").write_text("from .deep import SCALE\n", encoding="utf-8")
    deep.write_text("SCALE = 1.0\n", encoding="utf-8")
    script.write_text(SCRIPT.replace("self.factor *", "SCALE *") + "from ramp_package import SCALE\n", encoding="utf-8")
    explain = ("explain", "--texts", texts, "--method", script, "--json", found)

    def loaded_anew():
        for name in [name for name in sys.modules if name.startswith("ramp_package")]:
            monkeypatch.delitem(sys.modules, name)

    try:
        assert run(*explain)[0] == 0
        before = digest_of(find(script))
        deep.write_text("SCALE = 22.0\n", encoding="utf-8")
        assert digest_of(find(script)) == before  # what runs is still the old one
        loaded_anew()
        code, _, err = run(*explain)
        assert code == 2
        assert "holds something else than the results of this run, at line 1; name another file" in err
        assert digest_of(find(script)) == digest_of(METHODS["ramp"]) != before
    finally:
        loaded_anew()


def test_modules_that_a_script_imports_only_when_it_is_used(script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    lazy = tmp_path / "ramp_lazy.py"
    lazy.write_text("SCALE = 1.0\n", encoding="utf-8")
    script.write_text(f"{SCRIPT}\ndef scale():\n    from ramp_lazy import SCALE\n", encoding="utf-8")
    before = digest_of(find(script))
    lazy.write_text("SCALE = 2.0\n", encoding="utf-8")
    assert digest_of(find(script)) != before
    assert "ramp_lazy" not in sys.modules


def test_methods_that_a_module_of_ones_own_registers(script, tmp_path, monkeypatch):
    """The second time, too, when the module is imported already and registers nothing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = "from lrpx import LRP\nfrom lrpx.methods import *\n" + "".join(
        f"register(Backward('{name}', LRP))\n" for name in ("one of mine", "another of mine")
    )
    (tmp_path / "ramp_methods.py").write_text(lines, encoding="utf-8")
    script.write_text("import ramp_methods\n", encoding="utf-8")
    try:
        for name in ("one of mine", "another of mine", "one of mine"):
            assert find(f"{script}:{name}") is METHODS[name]
            assert digest_of(METHODS[name]) is not None
        with pytest.raises(MethodError, match="has these methods: one of mine, another of mine; name one of them"):
            find(script)
    finally:
        sys.modules.pop("ramp_methods")


def test_a_recipes_file_is_a_method(run, tmp_path):
    path = tmp_path / "mine.json"
    lrpx.ATTNLRP.at("*.mlp", linear=lrpx.Gamma(0.25)).save(path)
    explain = Explainer.from_pretrained()
    by_file = explain("The doors of the house", " are", method=str(path))
    by_recipe = explain("The doors of the house", " are", method=lrpx.Recipe.load(path))
    assert by_file == by_recipe
    assert not torch.allclose(by_file.relevance.clone(), explain("The doors of the house", " are").relevance.clone())
    code, printed, err = run("explain", "The doors of the house", "--target", " are", "--method", path)
    assert (code, err) == (0, "")
    assert "Gamma(gamma=0.25)" in printed


def test_a_recipe_that_was_changed_and_kept_its_name_says_so(run, tmp_path):
    path = tmp_path / "mine.json"
    lrpx.ATTNLRP.save(path)
    assert find(str(path)).name == find(lrpx.ATTNLRP).name == "attnlrp"
    path.write_text(path.read_text().replace('"softmax": "unmodified"', '"softmax": "constant"'))
    assert find(str(path)).name == find(replace(lrpx.ATTNLRP, softmax=constant)).name == "attnlrp, changed"
    assert find(replace(lrpx.ATTNLRP, strict=False)).name == "attnlrp, changed"
    code, printed, err = run("explain", "The doors", "--method", path, "--method", "attnlrp", "--json", "-")
    assert (code, err) == (0, "")
    changed, ours = json.loads(printed)
    assert [each["provenance"]["method"] for each in (changed, ours)] == ["attnlrp, changed", "attnlrp"]
    assert changed["parts"] != ours["parts"]


def test_a_recipe_of_ours_keeps_its_name_where_it_is_all_of_the_method():
    assert [find(each).name for each in (lrpx.ATTNLRP, lrpx.LRP, lrpx.GRADIENT)] == ["attnlrp", "lrp", "gradient"]
    assert find(lrpx.PA_LRP).name == "pa-lrp, recipe alone"  # the method adds what positions have


def test_the_same_script_may_be_run_again(script):
    assert find(script) is not find(script)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"has these methods: none; name one of them"),
        ("1 / 0\n", r"cannot be run \(ZeroDivisionError: division by zero\); mend it"),
        (SCRIPT + SCRIPT.replace("ramp", "other"), r"has these methods: ramp, other; name one of them: .*ramp.py:NAME"),
        (SCRIPT.replace('"ramp"', '"lrp"'), r"there is a method 'lrp' already; give yours another name"),
        (
            SCRIPT.replace('"ramp"', '"cp-lrp"'),
            r"'cp-lrp' is another name of the method 'lrp'; give yours another name",
        ),
        (SCRIPT.replace("(Method)", ""), r"is no method; derive it from lrpx.Method"),
    ],
)
def test_scripts_that_are_wrong(script, text, message):
    script.write_text(text, encoding="utf-8")
    with pytest.raises(MethodError, match=message):
        find(script)


def test_what_is_no_script(tmp_path):
    with pytest.raises(MethodError, match=r"there is no script .*none\.py; name a Python file"):
        find(tmp_path / "none.py")
    with pytest.raises(MethodError, match=r"there is no method 'nothing'; the methods are attnlrp, lrp"):
        find("nothing")
    with pytest.raises(MethodError, match=r"the method is int; pass one of"):
        find(7)


def test_cp_lrp_is_lrp():
    assert find("cp-lrp") is METHODS["lrp"]


def test_a_method_that_finds_too_little_is_refused():
    class Short(Method):
        name = "short"

        def attribute(self, model, questions, *, ledger=False):
            return Found(model.ask(questions), ())

    with pytest.raises(MethodError, match="a method found relevance for 0 of 1 questions"):
        Explainer(models.tiny_gpt2())(IDS, method=Short())


@dataclass(frozen=True)
class Bad(Method):
    numbers: tuple
    name: str = "bad"

    def attribute(self, model, questions, *, ledger=False):
        return Found(model.ask(questions), (torch.tensor(self.numbers),))


def test_relevance_that_is_none_is_refused():
    explain = Explainer(models.tiny_gpt2())
    with pytest.raises(MethodError, match=r"bad found relevance of shape \[2\] for 3 tokens; give one number for each"):
        explain(IDS[:3], method=Bad((1.0, 2.0)))
    for number in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match="the relevance of bad is not finite"):
            explain(IDS[:3], method=Bad((1.0, number, 2.0)))
    with pytest.raises(MethodError, match="bad found relevance that is int64; give a floating-point tensor"):
        explain(IDS[:3], method=Bad((1, 2, 3)))


@pytest.mark.parametrize("kind", [list, np.array])
def test_relevance_that_is_no_tensor_is_refused(kind):
    class Listed(Bad):
        def attribute(self, model, questions, *, ledger=False):
            return Found(model.ask(questions), (kind(self.numbers),))

    with pytest.raises(MethodError, match=r"bad found relevance that is (list|ndarray); give a floating-point tensor"):
        Explainer(models.tiny_gpt2())(IDS[:3], method=Listed((1.0, 2.0, 3.0)))


def test_relevance_that_still_has_its_gradients_is_found_without_them():
    class Graphed(Bad):
        def attribute(self, model, questions, *, ledger=False):
            return Found(model.ask(questions), (torch.tensor(self.numbers, requires_grad=True),))

    bound = Explainer(models.tiny_gpt2()).bound
    questions = Questions((bound.reader.row(IDS[:3]),), (Question(0, 2, lrpx.Logit(7)),))
    (relevance,) = attribute_all([Graphed((1.0, 2.0, 3.0))], bound, questions)["bad"].relevance
    assert relevance.tolist() == [1.0, 2.0, 3.0]
    assert not relevance.requires_grad


def test_a_method_that_has_no_ledgers_and_says_so_nowhere_is_refused_when_asked_for_one():
    with pytest.raises(MethodError, match="bad found no ledgers, and says that it has them; set has_ledger = False"):
        Explainer(models.tiny_gpt2())(IDS[:3], method=Bad((1.0, 2.0, 3.0)), ledger=True)


def test_other_packages_bring_methods_by_entry_points(tmp_path, monkeypatch):
    """A package that is really there, with its metadata; and one whose module is broken is a warning."""
    from lrpx._registry import Registry

    for name, text in {"goodpkg": "import lrpx._registry\nfrom tests.methods.test_own import ENTRIES\n"
                       "ENTRIES.add('theirs', 5, __name__)\n", "badpkg": "1 / 0\n"}.items():  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        meta = tmp_path / f"{name}-1.0.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (meta / "entry_points.txt").write_text(f"[lrpx.numbers]\n{name} = {name}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    global ENTRIES
    ENTRIES = Registry("number", MethodError, "lrpx.numbers")
    with pytest.warns(UserWarning, match=r"the number 'badpkg' of badpkg cannot be loaded \(ZeroDivisionError"):
        assert list(ENTRIES) == ["theirs"]
    assert ENTRIES["theirs"] == 5


ENTRIES = None


def test_what_a_package_brings_is_known_by_its_code(tmp_path):
    """A package that is edited in place, as one that is being written, is another when it is loaded again."""
    package, meta = tmp_path / "plugged", tmp_path / "plugged-1.0.dist-info"
    package.mkdir()
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n", encoding="utf-8")
    (meta / "entry_points.txt").write_text("[lrpx.numbers]\nhalf = plugged.main\n", encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "other.py").write_text("VALUE = 1\n", encoding="utf-8")
    main = "from seen import ENTRIES\nfrom plugged.other import VALUE\nENTRIES.add('half', [VALUE], __name__)\n"
    (package / "main.py").write_text(main, encoding="utf-8")
    (tmp_path / "seen.py").write_text(
        "from lrpx._registry import Registry\nfrom lrpx.errors import MethodError\n"
        "ENTRIES = Registry('number', MethodError, 'lrpx.numbers')\n",
        encoding="utf-8",
    )
    asked = "import seen; from lrpx._scripts import settings_of; print(settings_of('number', dict(seen.ENTRIES)))"

    def digest(*before):
        code = "; ".join([*before, asked])
        ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return ran.stdout

    first = digest()
    assert first.startswith("{'script of the number half': '")
    assert digest() == digest("import plugged.main") == first
    for file, line in (("other.py", "VALUE = 22\n"), ("main.py", main + "# another\n")):
        (package / file).write_text(line, encoding="utf-8")
        assert digest() != first


def test_registering_needs_a_method():
    with pytest.raises(MethodError, match=r"is no method; derive it from lrpx\.Method"):
        register(7)
    with pytest.raises(MethodError, match="there is a method 'lrp' already"):
        register(Backward("lrp", lrpx.LRP))
