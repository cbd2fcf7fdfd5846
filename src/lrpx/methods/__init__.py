"""The methods: model + inputs + target → relevance of every token."""

from lrpx.methods.backward import ATTNLRP, GRADIENT_L1, GRADIENT_L2, GRADIENT_X_INPUT, LRP, METHODS, Backward

__all__ = ["ATTNLRP", "GRADIENT_L1", "GRADIENT_L2", "GRADIENT_X_INPUT", "LRP", "METHODS", "Backward"]
