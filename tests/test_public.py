"""What is public: every module without an underscore, and of each what its ``__all__`` names; no more is promised."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import lrpx

ROOT = Path(lrpx.__file__).parent
PUBLIC = {
    "lrpx": """ATTNLRP GRADIENT LRP METHODS PA_LRP Add Along Attribution Attributions Cell Clamp Contrast Epsilon
        Explainer Gamma LRPxError Ledger LogProb Logit Margin Method Part Patch Recipe Scale Set Similarity Span
        Tap Target Task Trace ZPlus intervene propagate register""",
    "lrpx.attribution": "Attribution Explained Prediction Provenance Token",
    "lrpx.attributions": "Attributions",
    "lrpx.benchmarks": """BENCHMARKS Benchmark Case Dropped GroundTruth Group Kept Perturbed Run Samples Source
        Words find keep register""",
    "lrpx.cards": """Card Collection Hit Kept Lens Passage References Scale Shown Written card collect
        explain_units from_table index_page merge page search to_table""",
    "lrpx.circuits": "Graph check_closes chosen exact_edges graph_of run scores",
    "lrpx.cli": "main",
    "lrpx.composites": "GRID composites plotted rule search",
    "lrpx.coverage": "CHECKS MAPPINGS Checked ModelClass check choose every_class markdown summary sweep versions",
    "lrpx.engine": "Call Positions Ran Running Source Tap Trace propagate",
    "lrpx.errors": """DataError InputError LRPxError MethodError MissingExtraError ModelError NonFiniteError
        ResultError ResultFileError TargetError TraceError UnknownOperationError""",
    "lrpx.explainer": "Explainer",
    "lrpx.flow": "Flow",
    "lrpx.inputs": "Reader Row Segment",
    "lrpx.interventions": "Add Along Change Clamp Patch Scale Set intervene record",
    "lrpx.ledger": "KINDS Entry Ledger",
    "lrpx.methods": """ALIASES METHODS AltiLogit AtMan Backward Centre Found FullGrad GradCam GradientRollout
        GradientShap InformationFlow IntegratedGradients KernelShap LeaveOneOut Method Occlusion Position
        PositionAware Random Rollout SmoothGrad attribute_all find register""",
    "lrpx.metrics": """ANSWERS IMAGE_METRICS METRICS MOSAIC_METRICS PERTURBATION_METRICS Curve Given Metric
        PerturbationMetric SetMetric holm interval iou metric mrr paired_test perturbation_metric pg pta rma top1""",
    "lrpx.model": "BoundModel Spec",
    "lrpx.neurons": "relevance_of_units",
    "lrpx.parts": "Part Parts",
    "lrpx.patching": "BY_POSITION KINDS Pair attributed coefficients exact pair_of parts_of patched recorded",
    "lrpx.perturbations": "READS WAYS Perturbation outputs",
    "lrpx.questions": "Answers Question Questions",
    "lrpx.ranking": "MeanUnit Ranking Unit",
    "lrpx.recipes": """ALTI_LOGIT ATTNLRP ATTNLRP_VIT GIM GRADIENT LIBRAGRAD LRP LRP_CHEFER LRP_DING LRP_VIT
        LRP_VOITA PA_LRP RELP Override Recipe""",
    "lrpx.rules": """AlphaBeta AumannShapley Epsilon Flat Gamma Rule Scaled Temperature WSquare ZBox ZPlus constant
        identity ratio signal_take_all uniform uniform_bias unmodified with_gradient_of""",
    "lrpx.runs": "BROKEN Store digest read_columns read_table versions write_table write_whole",
    "lrpx.sae": "Feature FeatureRelevance FeatureTap SparseAutoencoder explain_features",
    "lrpx.sanity": "SIMILAR Mean Sane Sanity Stage check",
    "lrpx.targets": "Cell Contrast LogProb Logit Margin Preferred Similarity Span Target",
    "lrpx.tasks": "Task",
    "lrpx.tuning": "GRIDS Tried Tuned candidates tune",
    "lrpx.units": "KINDS Kind Place Reading place_in places",
}
"""Every public name. A change here is a change of what users may rely on, and stands in the changelog."""


def test_the_modules_without_an_underscore_are_the_public_ones():
    found = {module.name for module in pkgutil.walk_packages([str(ROOT)], "lrpx.")}
    assert {name for name in found if "._" not in name} | {"lrpx"} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_module_exports(name):
    module = importlib.import_module(name)
    assert set(module.__all__) == set(PUBLIC[name].split())
    for each in module.__all__:
        thing = getattr(module, each)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name}.{each} has no docstring"


FILES = sorted(ROOT.rglob("*.py"))
OURS = {
    node.attr
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    if node.attr.startswith("_") and not node.attr.startswith("__")
} - {"_parameters", "_buffers", "_modules"}
"""The private attributes of our own classes."""


def private_uses(tree):
    """Where a private attribute is read of something that is not ``self``: ``(line, attribute)``."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OURS and node.attr not in own | assigned:
            yield node.lineno, node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_private_of_another_files_class_is_used(path):
    assert list(private_uses(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_a_private_use_would_be_found():
    name = min(OURS)
    assert list(private_uses(ast.parse(f"def f(x):\n    return x.{name}\n"))) == [(2, name)]
    assert list(private_uses(ast.parse(f"class C:\n    def f(self):\n        return self.{name}\n"))) == []


@pytest.mark.parametrize("name", ["nonsense", "no.such.module", "rules.Gamma", "py.typed", "a b", "..", "", "a\0b"])
def test_a_name_that_is_none_is_an_attribute_error(name):
    assert not hasattr(lrpx, name)
