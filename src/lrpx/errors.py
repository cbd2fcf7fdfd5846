"""Every error LRPx raises on purpose. Each message names the thing and ends with the mend."""

from __future__ import annotations

__all__ = [
    "DataError",
    "InputError",
    "LRPxError",
    "MethodError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "ResultError",
    "ResultFileError",
    "TargetError",
    "TraceError",
    "UnknownOperationError",
]


class LRPxError(Exception):
    """The root of the tree: ``except lrpx.LRPxError`` catches whatever LRPx raises on purpose."""


class InputError(LRPxError, ValueError):
    """The text, the token ids or the chat messages cannot be explained as they are."""


class TargetError(LRPxError, ValueError):
    """The target, the contrast or the position does not name one thing to explain."""


class ModelError(LRPxError, ValueError):
    """The model cannot be found, loaded, or is not of a kind the explainer can read."""


class MethodError(LRPxError, ValueError):
    """The method is unknown, or does not apply to this architecture."""


class UnknownOperationError(LRPxError, RuntimeError):
    """A differentiable operation that is neither known to be linear nor has a rule."""


class NonFiniteError(LRPxError, FloatingPointError):
    """NaN or infinity in the model's outputs or in the relevance."""


class TraceError(LRPxError, RuntimeError):
    """A trace was asked for something it does not hold."""


class DataError(LRPxError, ValueError):
    """A data file cannot be read as it is; names the file and the line."""


class MissingExtraError(LRPxError, ImportError):
    """A package that only some commands need is not installed; says how to install it."""


class ResultError(LRPxError, ValueError, KeyError):
    """A result has no such part, its parts do not fit together, or it was to be written into."""

    __str__ = Exception.__str__  # a KeyError's is the text in quotes


class ResultFileError(LRPxError, ValueError):
    """A result file cannot be read or written."""
