"""The operations that need no rule: their plain gradient is right under every recipe.

They are linear without weights (sums, shapes, pooling), or a selection among their inputs (``max``, ``topk``,
``where``), or no computation at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Parameter

from lrpx.engine import _functions
from lrpx.engine._operation import Operation
from lrpx.engine._tensors import PLAIN, any_carries, constants

if TYPE_CHECKING:
    from lrpx.engine._operation import Gate, Handler
    from lrpx.engine._run import Run


def plain(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation as it is, on constants that are detached."""
    if not kwargs and PLAIN.issuperset(map(type, args)):  # nearly always
        return func(*args)
    return func(*constants(args), **constants(kwargs))


TRANSPOSES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties of a tensor that are operations on it."""


def attribute(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A property of a tensor, or what is one of its operations without brackets."""
    if type(args[0]) is Parameter and func.__self__.__name__ in TRANSPOSES:
        return func(args[0].detach())
    return func(*args)


def embedding(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A look-up: a leaf of the graph, unless what is looked up in was computed."""
    given: tuple[Any, ...] = (*args[:2], *(kwargs[n] for n in ("input", "indices", "weight") if n in kwargs))
    ids, weight = given
    if ids.is_floating_point():  # torch.embedding has the weight first
        ids, weight = weight, ids
    out = func(*constants(args), **constants(kwargs))
    factors = constants((*args[2:], kwargs.get("per_sample_weights")))
    if any_carries(factors):
        run.refuse(f"{func.__name__} with per_sample_weights that depend on the input")
        return out
    if not weight.requires_grad or weight.is_leaf:
        return run.source(weight, ids, out)
    return out


def _each(names: str, gate: Gate | None = None, handler: Handler = plain, **facts: Any) -> list[Operation]:
    return [Operation(name, (name,), handler, "plain", gate, **facts) for name in names.split()]


MOVES = _each(
    """view reshape squeeze expand transpose permute
    swapaxes swapdims movedim t flatten unflatten ravel adjoint dropout alpha_dropout feature_alpha_dropout dropout1d
    dropout2d dropout3d cpu cuda""",
    "moves",
) + _each("view_as reshape_as expand_as", "moves", has_summands=False)
MOVES += _each("type float half bfloat16 double clone contiguous", "moves", _functions.plain_scaling)
MOVES += _each("to type_as", "moves", _functions.plain_scaling, has_summands=False)
MOVES += _each("unsqueeze", "moves", _functions.plain_of_exponentials)

SUMS = [
    Operation(name, tuple(spellings.split()), _functions.plain_sum, "plain", "stays", numbers=(1,))
    for name, spellings in {
        "add": "add __add__ __radd__ add_ __iadd__",
        "sub": "sub subtract __sub__ sub_ __isub__",
        "rsub": "rsub",
    }.items()
]

SELECTS = (
    _each(
        """chunk split tensor_split split_with_sizes unbind unsafe_chunk unsafe_split narrow select
        index_select gather take_along_dim topk sort repeat repeat_interleave tile broadcast_to roll flip pad tril
        triu""",
        "stays",
    )
    + _each("neg negative __neg__", "stays", _functions.plain_scaling)
    + _each("__getitem__", "stays", _functions.plain_of_exponentials)
    + _each("masked_fill", "stays", _functions.plain_of_exponentials, numbers=(2,))
    + _each("masked_fill_", "stays", numbers=(2,))
    + _each("where", "stays", _functions.plain_where, numbers=(1, 2))
)

OTHERS = (
    _each(
        """__pos__ positive mean nansum cumsum cumsum_ diff trace
        cat concat concatenate stack hstack vstack dstack column_stack row_stack hsplit vsplit dsplit narrow_copy slice
        index_add index_add_ index_copy index_copy_ take scatter scatter_ scatter_add scatter_add_ scatter_reduce
        masked_scatter masked_scatter_ masked_select zero_ copy_ fill_diagonal_ diag diagonal diag_embed
        diagonal_scatter slice_scatter select_scatter tril_ triu_ fliplr flipud rot90
        unfold fold im2col col2im as_strided constant_pad_nd _pad interpolate upsample pixel_shuffle
        pixel_unshuffle channel_shuffle affine_grid avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
        adaptive_max_pool1d adaptive_max_pool2d max amax min amin maximum minimum fmax fmin msort kthvalue median
        cummax cummin nan_to_num nan_to_num_ requires_grad_ detach detach_ numpy
        real imag view_as_real view_as_complex complex conj resolve_conj resolve_neg
        fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn fft_fft fft_ifft fft_rfft fft_irfft fft_fftn fft_ifftn
        align_to pin_memory data_ptr size dim numel stride item tolist __len__ __bool__ __contains__ ndimension
        is_floating_point is_complex get_device element_size storage_offset is_contiguous register_hook retain_grad
        __format__ __repr__ __hash__ __deepcopy__ untyped_storage swapaxes_ unsqueeze_ squeeze_ transpose_ t_"""
    )
    + _each("__setitem__ index_put index_put_", numbers=(2,))
    + _each("index_fill index_fill_", numbers=(3,))
    + _each("fill_", numbers=(1,))
    + _each("sum", handler=_functions.plain_of_exponentials)
    + _each("grid_sample", has_summands=False)
)

ROWS = [
    *MOVES, *SUMS, *SELECTS, *OTHERS,
    Operation("attribute", ("__get__",), attribute, "plain"),
    Operation("embedding", ("embedding", "embedding_bag"), embedding, "source"),
]  # fmt: skip
