"""Coverage: does every model class of transformers run under the rules, and does its ledger close?"""

from lrpx.coverage._checking import CHECKS, Checked, check
from lrpx.coverage._classes import MAPPINGS, ModelClass, choose, every_class
from lrpx.coverage._report import markdown, summary
from lrpx.coverage._sweeping import sweep, versions

__all__ = [
    "CHECKS",
    "MAPPINGS",
    "Checked",
    "ModelClass",
    "check",
    "choose",
    "every_class",
    "markdown",
    "summary",
    "sweep",
    "versions",
]
