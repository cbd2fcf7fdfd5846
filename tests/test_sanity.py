"""Sanity checks: what is told is what a slow twin finds, a bad method fails each, and the model stays as it is."""

from __future__ import annotations

import copy
import io
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from scipy.stats import spearmanr

import lrpx
from lrpx import sanity
from lrpx.cli import _check
from lrpx.errors import InputError, MethodError, ModelError, NonFiniteError
from lrpx.methods import Found, Method
from lrpx.methods._backward import Backward
from lrpx.model import BoundModel, Spec
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from tests import tiny
from tests.pictured import processor, vit

if TYPE_CHECKING:
    from lrpx.questions import Questions as Asked

TEXTS = ["The doors of the old house", "The keys to the cabinet that stands in the hall", "What a lovely film, and"]


@pytest.fixture(scope="module")
def bundled() -> BoundModel:
    return Spec(dtype="float64").build()


@dataclass(frozen=True)
class Ramp(Method):
    """Relevance that knows nothing but the order of the tokens."""

    name: str = "ramp"

    @property
    def has_ledger(self) -> bool:
        return False

    def attribute(self, model: BoundModel, questions: Asked, *, ledger: bool = False) -> Found:
        answers = model.ask(questions)
        lengths = [sum(questions.row_of(i).lengths) for i in range(len(questions))]
        return Found(answers, tuple(torch.arange(n, dtype=torch.float64) for n in lengths))


@dataclass(frozen=True)
class Flat(Ramp):
    """The same relevance for all tokens."""

    name: str = "flat"

    def attribute(self, model: BoundModel, questions: Asked, *, ledger: bool = False) -> Found:
        found = super().attribute(model, questions, ledger=ledger)
        return replace(found, relevance=tuple(map(torch.ones_like, found.relevance)))


@dataclass(frozen=True)
class Careless(Backward):
    """AttnLRP whose numbers hang on the batch, and whose ledger loses a tenth."""

    name: str = "careless"
    recipe: lrpx.Recipe = lrpx.ATTNLRP

    def together(self, methods: Any, model: BoundModel, questions: Asked, *, ledger: bool = False) -> list[Found]:
        found = Backward.together(self, methods, model, questions, ledger=ledger)
        moved = [tuple(each + 0.1 * (len(questions.rows) - 1) for each in one.relevance) for one in found]
        ledgers = [
            None if one.ledgers is None else tuple(replace(x, explained=1.1 * x.explained) for x in one.ledgers)
            for one in found
        ]
        return [replace(f, relevance=m, ledgers=g) for f, m, g in zip(found, moved, ledgers, strict=True)]


def test_our_methods_pass_and_bad_ones_fail(bundled: BoundModel) -> None:
    found = sanity.check(bundled, _check.TEXTS, ["attnlrp", "lrp", Ramp(), Flat(), Careless()])
    verdicts = {sane.method: sane.verdicts() for sane in found.methods}
    every = {"randomised weights": True, "another class": True, "ledger": True, "batch": True}
    assert verdicts["attnlrp"] == verdicts["lrp"] == every
    blind = {"randomised weights": False, "another class": False, "ledger": None}
    assert verdicts["ramp"] == verdicts["flat"] == every | blind
    assert verdicts["careless"] == every | {"ledger": False, "batch": False}
    of_ramp = next(sane for sane in found.methods if sane.method == "ramp")
    assert {stage.cascade.value for stage in of_ramp.stages} == {1.0}
    lrp = next(sane for sane in found.methods if sane.method == "lrp")
    assert lrp.complete == pytest.approx((1.0, 1.0, 1.0), abs=1e-6)  # the model has no biases


def test_a_stage_is_its_slow_twin(bundled: BoundModel) -> None:
    """A copy is made random weight by weight, and explained text by text."""
    found = sanity.check(bundled, TEXTS, ["lrp"], seed=3)
    parts = sanity.parts_of(bundled.module)
    assert list(parts) == ["head", *(f"model.layers.{n}" for n in reversed(range(6))), "embeddings"]
    assert sorted(name for names in parts.values() for name in names) == sorted(
        name for name, _ in bundled.module.named_parameters()
    )
    explainer = lrpx.Explainer.of(bundled)
    trained = [explainer(text, method="lrp") for text in TEXTS]

    def alike(randomised: list[str]) -> float:
        module = copy.deepcopy(bundled.module)
        weights = dict(module.named_parameters())
        for part in randomised:
            generator = torch.Generator().manual_seed(3 * 65_537 + list(parts).index(part))
            for name in parts[part]:
                w = weights[name].detach().float()
                noise = torch.randn(w.shape, generator=generator)
                weights[name].data = (noise * w.std(correction=0) + w.mean()).double()
        other = lrpx.Explainer(module, bundled.tokenizer)
        again = [
            other(text, bundled.index(each.prediction.text), method="lrp")  # type: ignore[union-attr]
            for text, each in zip(TEXTS, trained, strict=True)
        ]
        pairs = zip(trained, again, strict=True)
        return float(np.mean([spearmanr(a.relevance, b.relevance).statistic for a, b in pairs]))

    (sane,) = found.methods
    order = list(parts)
    for at in (0, 3, len(order) - 1):
        assert sane.stages[at].cascade.value == pytest.approx(alike(order[: at + 1]), abs=1e-9)
        assert sane.stages[at].alone.value == pytest.approx(alike([order[at]]), abs=1e-9)


def test_nothing_of_the_model_changes(bundled: BoundModel) -> None:
    before = {name: (w.clone(), w.requires_grad, w.grad) for name, w in bundled.module.named_parameters()}
    drawn, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    sanity.check(bundled, TEXTS[:1], ["lrp"])
    with pytest.raises(KeyboardInterrupt):
        sanity.check(bundled, TEXTS[:1], ["lrp"], done=_interrupted(4))
    for name, weight in bundled.module.named_parameters():
        was, needed, gradient = before[name]
        assert torch.equal(weight, was)
        assert (weight.requires_grad, weight.grad) == (needed, gradient)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (np.random.get_state()[1] == numpys).all()  # type: ignore[index]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bundled.module.modules())


def _interrupted(after: int) -> Any:
    count = iter(range(after))

    def done(_: int) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt

    return done


def test_the_random_copy_pools_as_the_model_does() -> None:
    model = BoundModel(tiny.build(transformers.BertModel, transformers.BertConfig(**tiny.SIZES)), pooling="cls")
    copied = sanity._RandomCopy(model, sanity.parts_of(model.module), 0).bound
    one, other = (lrpx.Explainer.of(each)(([3, 14, 15], [9, 26])) for each in (model, copied))
    assert model.pooling.kind == copied.pooling.kind == "cls"
    assert torch.equal(one.relevance, other.relevance)


def test_every_step_is_told(bundled: BoundModel) -> None:
    told: list[int] = []
    sanity.check(bundled, TEXTS[:1], ["lrp", Ramp()], done=told.append)
    assert sum(told) == sanity.steps(bundled, ["lrp", Ramp()])


@pytest.mark.slow
def test_one_seed_is_one_result_and_another_another(bundled: BoundModel) -> None:
    one, same, other = (sanity.check(bundled, TEXTS[:1], ["lrp"], seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.methods[0].stages != other.methods[0].stages


def test_one_seed_is_one_result_whatever_torchs_default_dtype_is(piece_tokenizer: Any) -> None:
    """It drew other weights in float64."""
    model = BoundModel(tiny.bert_classifier(vocab_size=len(piece_tokenizer)).double(), piece_tokenizer)
    expected = sanity.check(model, ["the keys to the cabinet"], ["lrp"])
    torch.set_default_dtype(torch.float64)
    try:
        found = sanity.check(model, ["the keys to the cabinet"], ["lrp"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_the_other_class_of_two_is_the_other(piece_tokenizer: Any) -> None:
    model = BoundModel(tiny.bert_classifier(vocab_size=len(piece_tokenizer)).double(), piece_tokenizer)
    texts = ["the keys to the cabinet", "a lovely film"]
    sane = sanity.check(model, texts, ["attnlrp"]).methods[0]
    rows = tuple(model.reader.rows(texts))
    classes = model.module.config.num_labels
    if classes == 2:
        answers = model.ask(Questions(rows, tuple(Question(i, None, Logit()) for i in range(2))))
        explainer = lrpx.Explainer.of(model)
        wanted = [
            spearmanr(explainer(text, t).relevance, explainer(text, 1 - t).relevance).statistic
            for text, t in zip(texts, (int(t.token) for t in answers.targets), strict=True)  # type: ignore[attr-defined]
        ]
        assert sane.other is not None
        assert sane.other.value == pytest.approx(float(np.mean(wanted)), abs=1e-9)
    assert sane.batch is not None


@pytest.mark.parametrize(
    ("texts", "methods", "error", "said"),
    [
        ([], ["lrp"], InputError, "no texts"),
        (["the doors of", "a"], ["lrp"], InputError, "text 2 .*fewer than 3 tokens"),
        (TEXTS, ["nothing"], MethodError, "nothing"),
        (TEXTS, [], MethodError, "the methods are none"),
        (TEXTS, ["lrp", Backward("lrp", lrpx.ATTNLRP)], MethodError, "the methods are lrp, lrp; .* each once"),
    ],
)
def test_bad_input_is_refused_by_name(
    bundled: BoundModel, texts: list[str], methods: list[Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        sanity.check(bundled, texts, methods)


def test_a_model_of_images_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"ViTForImageClassification is an image classifier, and these checks read"):
        sanity.check(BoundModel(vit(), processor()), ["a text"], ["lrp"])


def test_one_text_is_not_compared_with_itself(bundled: BoundModel) -> None:
    (sane,) = sanity.check(bundled, TEXTS[:1], [Careless()]).methods
    assert sane.batch is None
    assert sane.verdicts()["batch"] is None


@pytest.mark.parametrize(("texts", "batch_size"), [(TEXTS, 1), (["What a lovely film, and " * 20, TEXTS[0]], 16)])
def test_texts_that_never_run_together_pass_no_check_of_a_batch(
    bundled: BoundModel, texts: list[str], batch_size: int
) -> None:
    (sane,) = sanity.check(bundled, texts, ["lrp"], batch_size=batch_size).methods
    assert sane.batch is None
    assert sane.verdicts()["batch"] is None


def test_a_model_that_cannot_be_made_random_is_refused_by_name(bundled: BoundModel) -> None:
    training = BoundModel(copy.deepcopy(bundled.module).train(), bundled.tokenizer)
    with pytest.raises(ModelError, match=r"call model.eval\(\)"):
        sanity.check(training, TEXTS, ["lrp"])
    module = copy.deepcopy(bundled.module)
    module.lm_head.__deepcopy__ = _uncopied  # type: ignore[union-attr,assignment]
    with pytest.raises(ModelError, match="cannot be copied"):
        sanity.check(BoundModel(module, bundled.tokenizer), TEXTS, ["lrp"])


def _uncopied(_: Any) -> Any:
    raise RuntimeError("no copies")


def test_numbers_that_are_none_name_the_random_part(bundled: BoundModel) -> None:
    module = copy.deepcopy(bundled.module)
    unused = module.model.layers[3].mlp.down_proj  # type: ignore[index,union-attr]
    with torch.no_grad():  # a column that is met by zeros, until the weights above it are random
        module.model.layers[3].mlp.up_proj.weight[7] = 0.0  # type: ignore[index,union-attr]
        unused.weight[0, 7] = 1e300
    with pytest.raises(NonFiniteError, match=r"with random weights in model\.layers\.3"):
        sanity.check(BoundModel(module, bundled.tokenizer), TEXTS, ["gradient-x-input"])


# ------------------------------------------------------------------------------------ the command


def test_the_page_is_shown_and_kept(run: Any, tmp_path: Any) -> None:
    (tmp_path / "texts.txt").write_text("The doors of the <b>house</b>\n\nThe key to the cabinets is\nnever read\n")
    code, out, _ = run(
        "check", "--texts", tmp_path / "texts.txt", "--limit", 2, "--method", "lrp", "--html", tmp_path / "page.html"
    )
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    for said in ("2 texts, seed 0", "randomised", "model.layers.5", "embeddings"):
        assert said in out
        assert said in page
    assert "passed" in out
    for said in (
        '<html lang="en">',
        "</h1>",
        "<title>Sanity checks of lrpx bundled model",
        'name="viewport"',
        "overflow-x:auto",
    ):
        assert said in page


@pytest.mark.parametrize("width", [30, 80, _check.WIDTH])
def test_no_number_and_no_name_is_cut_off_however_many_methods_there_are(width: int) -> None:
    names = ("attnlrp", "lrp", "gradient-x-input", "gradient-l1", "gradient-l2-squared", "leave-one-out", "alti-logit")
    means = [sanity.Mean(0.12, -0.34, 0.56), sanity.Mean(-0.78, -0.91, 0.23), sanity.Mean(0.45, 0.41, 0.48)]
    stages = tuple(sanity.Stage(part, *means) for part in ("head", "model.layers.0", "embeddings"))
    complete = (0.67, -1234.56, 89.01)
    made = tuple(sanity.Sane(name, stages, means[0], 1.2e-7, 3.4e-6, complete, 3.5e-4) for name in names)
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(_check.page(sanity.Sanity("m", "float32", 3, 0, made)))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in told
    assert max(map(len, told.splitlines())) <= width
    words = Counter(word.strip("[]().,") for word in told.replace("│", " ").split())
    for number in ("1.2e-07", "3.4e-06", "−1234.56", "89.01"):
        assert words[number] == len(names)
    assert words["−0.34"] == len(names) * (2 + len(stages))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--texts", "nowhere.txt"], "nowhere.txt"),
        (["--method", "nothing"], "nothing"),
        (["--texts", "page.txt", "--html", "page.txt"], "one file is named twice"),
        (["--html", "nowhere/page.html"], "create it first"),
        (["--model", "/nowhere"], "nowhere"),
    ],
)
def test_bad_options_end_with_one_line(run: Any, arguments: list[str], said: str) -> None:
    code, _, err = run("check", *arguments)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_limit_holds_for_our_sentences_too(run: Any) -> None:
    code, out, _ = run("check", "--limit", 2, "--method", "lrp")
    assert code == 0
    assert "2 texts, seed 0" in out


def test_a_file_without_a_text_is_refused(run: Any, tmp_path: Any) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    code, _, err = run("check", "--texts", tmp_path / "empty.txt")
    assert code == 2
    assert "no text" in err


@pytest.mark.slow
def test_a_table_of_texts_is_read_as_one(run: Any, tmp_path: Any) -> None:
    """Not as lines of text with braces, tabs and labels in them."""
    texts = ["The doors of the house", "The key to the cabinets is"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{text}", "label": "x"}}\n' for text in texts))
    (tmp_path / "texts.tsv").write_text("label\ttext\n" + "".join(f"x\t{text}\n" for text in texts))
    found = {run("check", "--texts", path, "--method", "lrp")[1] for path in sorted(tmp_path.glob("texts.*"))}
    assert len(found) == 1
    code, _, err = run("check", "--texts", tmp_path / "texts.html", "--method", "lrp")
    assert code == 2
    assert "name a file that ends in .tsv" in err
    (tmp_path / "words.csv").write_text("words\nThe doors\n")
    code, _, err = run("check", "--texts", tmp_path / "words.csv", "--method", "lrp")
    assert code == 2
    assert "call the column of the texts 'text'" in err


@pytest.mark.parametrize("seed", [-1, 2**32, 10**20, 1.0, True])
def test_a_seed_that_is_none(bundled: BoundModel, seed: Any) -> None:
    with pytest.raises(InputError, match="pass a whole number from 0 to 4294967295"):
        sanity.check(bundled, ["The doors of the house"], ["lrp"], seed=seed)
