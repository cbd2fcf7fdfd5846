"""What nodes of the graph do, by their names: which are linear, and which of these keep all of the numbers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch._C._autograd import _top_saved_tensors_default_hooks

from lrpx.errors import UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable

hooks_of_saved: Callable[[bool], Any] = _top_saved_tensors_default_hooks
"""The newest hooks, in this thread, that are given what the graph saves, if there are any; the argument is torch's
own, False."""

_OF_TYPE: dict[type, str] = {}
"""What the nodes compute that have a type of their own in torch: sooner looked up than a name is made."""


def kind(node: Any) -> str:
    """What a node of the graph computes: ``"Mul"``."""
    return _OF_TYPE.get(type(node)) or _named(node)


def _named(node: Any) -> str:
    name, its_type = node.name(), type(node)
    found = _kind(name)
    # torch's own types, and those of this package's functions; no other is kept
    function = getattr(its_type, "_forward_cls", None)
    if function is not None:
        is_lasting = function.__module__.startswith("lrpx.")
    else:
        is_lasting = its_type.__module__ == "builtins" and its_type.__name__ == name
    if is_lasting:
        _OF_TYPE[its_type] = found
    return found


@cache
def _kind(name: str) -> str:
    return name.split("::")[-1].rstrip("0123456789").removesuffix("Backward")


def saved(node: Any, name: str) -> Any:
    """What a node has saved for its backward pass by this name, or None.

    Raises:
        UnknownOperationError: a checkpoint is on its way, and would have to run again to tell.
    """
    if hooks_of_saved(False) is not None and f"_saved_{name}" in dir(node):
        raise UnknownOperationError(
            f"whether what {kind(node)} has made is a diagonal, or a sum, its constant factor or mask tells, which is "
            "not kept in a checkpoint; switch gradient checkpointing off, or leave recompute out"
        )
    return getattr(node, f"_saved_{name}", None)


SHAPES = frozenset(
    """View UnsafeView ReshapeAlias Alias Reshape ViewAs Permute Transpose T Movedim Swapaxes Unsqueeze Squeeze Expand
    ExpandAs Clone ToCopy Contiguous Neg""".split()
)
"""Nodes whose result is all of what they are made of, in another shape."""

SUMS = frozenset(("Add", "Sub", "Rsub"))

COPY = "CopyBackwards"
"""The node of a copy into another tensor, which comes first among what it is made of."""

LINEAR = (
    SHAPES
    | SUMS
    | frozenset(
        """Sum Mean Nansum Cumsum Diff Trace SumToSize Select SelectBackward Slice Index IndexSelect Gather Take
        TakeAlongDim Narrow Cat Stack Copy CopySlices AsStrided Unbind Split SplitWithSizes UnsafeSplit Repeat
        RepeatInterleave Tile Flip Roll Rot90 Unfold Diagonal DiagonalBackward DiagEmbed BlockDiag MaskedFill
        MaskedSelect MaskedScatter
        Where Tril Triu ConstantPadNd Max Min Amax Amin Topk Sort Kthvalue Median Maximum Minimum NativeDropout Detach
        Identity View As IndexPut IndexAdd IndexCopy IndexFill Scatter ScatterAdd SelectScatter SliceScatter
        DiagonalScatter AsStridedScatter Zero Fill Complex Real Imag ViewAsReal ViewAsComplex NanToNum Conj
        Fmax Fmin Cummax Cummin Aminmax Mode Nanmedian Embedding UnsafeIndex Im2Col Col2Im PixelShuffle PixelUnshuffle
        ChannelShuffle SegmentReduce AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D
        MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D AdaptiveMaxPool3D
        FractionalMaxPool2D FractionalMaxPool3D
        ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D
        UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D UpsampleBicubic2D
        UpsampleTrilinear3D UpsampleNearestExact1D UpsampleNearestExact2D UpsampleBilinear2DAa
        UpsampleBicubic2DAa""".split()
    )
    | {COPY}
)
"""Nodes that are linear without weights, or choose among what they are made of: their plain gradient is right."""

SCALES = frozenset(("Mul", "Div"))
"""Nodes that scale, where only one of what they are made of depends on the input."""

NORM = "_RMSNormConstantStd"
"""The node of an RMS norm in one function, which scales as one that is written out does."""

NOTHING = "lrpx nothing"
"""What a node is marked with whose result is zero, whatever it is made of."""

OWN = "_GradientOf"
"""The node of ``rules.with_gradient_of``, which hands on to one tensor what another was given."""

FUNCTION = "lrpx function"
"""The key, in what a node of the graph carries along, of what it is an element-wise function of: ``(edge of the root,
kind, exact, op)``; kind is 0 for a scaling."""
