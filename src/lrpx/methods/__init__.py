"""The methods: model + questions → relevance of every token. Each is one file, under one contract (:class:`Method`)."""

from lrpx.methods import (  # noqa: F401, I001 - the order of METHODS
    _backward, _alti_logit, _gradients, _leave_one_out, _occlusion, _atman, _integrated_gradients, _smoothgrad,
    _gradient_shap, _kernel_shap, _rollout, _gradient_rollout, _grad_cam, _ifr, _random, _position,
)  # fmt: skip
from lrpx.methods._alti_logit import AltiLogit
from lrpx.methods._backward import Backward
from lrpx.methods._contract import ALIASES, METHODS, Found, Method, attribute_all, register
from lrpx.methods._finding import find
from lrpx.methods._leave_one_out import LeaveOneOut

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
