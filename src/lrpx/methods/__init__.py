"""The methods: model + inputs + target → relevance of every token."""

from lrpx.methods.alti_logit import ALTI, ALTI_LOGIT, LOGIT, AltiLogit
from lrpx.methods.backward import ATTNLRP, GRADIENT_L1, GRADIENT_L2_SQUARED, GRADIENT_X_INPUT, LRP, Backward

Method = Backward | AltiLogit

METHODS: dict[str, Method] = {
    method.name: method
    for method in (ATTNLRP, LRP, ALTI_LOGIT, LOGIT, ALTI, GRADIENT_X_INPUT, GRADIENT_L1, GRADIENT_L2_SQUARED)
}
"""Methods by the name that the command line and the explainer take."""

__all__ = [
    "ALTI",
    "ALTI_LOGIT",
    "ATTNLRP",
    "GRADIENT_L1",
    "GRADIENT_L2_SQUARED",
    "GRADIENT_X_INPUT",
    "LOGIT",
    "LRP",
    "METHODS",
    "AltiLogit",
    "Backward",
    "Method",
]
