"""The methods: model + questions → relevance of every token. Each is one file, under one contract (:class:`Method`)."""

from lrpx.methods import (  # noqa: F401, I001 - the order of METHODS
    _backward, _alti_logit, _gradients, _others, _leave_one_out, _occlusion, _atman, _integrated_gradients, _smoothgrad,
    _gradient_shap, _kernel_shap, _rollout, _gradient_rollout, _grad_cam, _ifr, _random, _position, _centre, _full_grad,
)  # fmt: skip
from lrpx.methods._alti_logit import AltiLogit
from lrpx.methods._atman import AtMan
from lrpx.methods._backward import Backward
from lrpx.methods._centre import Centre
from lrpx.methods._contract import ALIASES, METHODS, Found, Method, attribute_all, register
from lrpx.methods._finding import find
from lrpx.methods._full_grad import FullGrad
from lrpx.methods._grad_cam import GradCam
from lrpx.methods._gradient_rollout import GradientRollout
from lrpx.methods._gradient_shap import GradientShap
from lrpx.methods._ifr import InformationFlow
from lrpx.methods._integrated_gradients import IntegratedGradients
from lrpx.methods._kernel_shap import KernelShap
from lrpx.methods._leave_one_out import LeaveOneOut
from lrpx.methods._occlusion import Occlusion
from lrpx.methods._position import Position
from lrpx.methods._random import Random
from lrpx.methods._rollout import Rollout
from lrpx.methods._smoothgrad import SmoothGrad

__all__ = [
    "ALIASES",
    "METHODS",
    "AltiLogit",
    "AtMan",
    "Backward",
    "Centre",
    "Found",
    "FullGrad",
    "GradCam",
    "GradientRollout",
    "GradientShap",
    "InformationFlow",
    "IntegratedGradients",
    "KernelShap",
    "LeaveOneOut",
    "Method",
    "Occlusion",
    "Position",
    "Random",
    "Rollout",
    "SmoothGrad",
    "attribute_all",
    "find",
    "register",
]
