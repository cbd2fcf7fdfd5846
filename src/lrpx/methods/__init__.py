"""The methods: model + questions → relevance of every token. A method is one file; see :mod:`lrpx.methods.contract`."""

from lrpx.methods import backward, alti_logit, gradients, leave_one_out  # noqa: F401, I001 - the order of METHODS
from lrpx.methods.alti_logit import AltiLogit
from lrpx.methods.backward import Backward
from lrpx.methods.contract import ALIASES, METHODS, Found, Method, attribute_all, register
from lrpx.methods.finding import find
from lrpx.methods.leave_one_out import LeaveOneOut

__all__ = [
    "ALIASES",
    "METHODS",
    "AltiLogit",
    "Backward",
    "Found",
    "LeaveOneOut",
    "Method",
    "attribute_all",
    "find",
    "register",
]
