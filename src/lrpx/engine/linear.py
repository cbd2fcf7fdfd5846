"""The torch functions whose plain gradient is right under every recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrpx import rules
from lrpx.engine.handlers import GATE, HANDLERS, PLAIN, constants, keep_gate

if TYPE_CHECKING:
    from lrpx.engine.mode import RuleMode

SHAPE = frozenset(
    """to type type_as float half bfloat16 double clone contiguous view view_as reshape reshape_as unsqueeze squeeze
    expand expand_as transpose permute swapaxes swapdims movedim t flatten unflatten ravel adjoint dropout
    alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d cpu cuda""".split()
)
"""Operations that move or cast what they are given: a gate stays a gate."""

KEEPS_GATE = frozenset(
    """__getitem__ chunk split tensor_split split_with_sizes unbind unsafe_chunk unsafe_split narrow select index_select
    gather take_along_dim topk sort repeat repeat_interleave tile broadcast_to roll flip masked_fill masked_fill_ where
    pad neg negative __neg__ add __add__ __radd__ sub __sub__ subtract rsub add_ __iadd__ sub_ __isub__""".split()
)
"""Selections, and sums with constants: a sigmoid or a softmax stays a gate."""

LINEAR = SHAPE | frozenset(
    """__get__ __getitem__ __setitem__ __neg__ __pos__ __add__ __radd__ __iadd__ __sub__ __isub__
    add add_ sub sub_ subtract rsub neg negative positive sum mean nansum cumsum cumsum_ diff trace
    cat concat concatenate stack hstack vstack dstack column_stack row_stack chunk split tensor_split
    split_with_sizes unbind unsafe_chunk unsafe_split hsplit vsplit dsplit narrow narrow_copy select slice
    index_select index_add index_add_ index_fill index_fill_ index_put index_put_ index_copy index_copy_ gather take
    take_along_dim
    scatter scatter_ scatter_add scatter_add_ scatter_reduce masked_fill masked_fill_ masked_scatter
    masked_scatter_ masked_select where fill_ zero_ copy_ fill_diagonal_ diag diagonal diag_embed diagonal_scatter
    slice_scatter select_scatter tril tril_ triu triu_ roll flip fliplr flipud rot90 repeat repeat_interleave tile
    broadcast_to unfold fold im2col col2im as_strided pad constant_pad_nd _pad interpolate upsample pixel_shuffle
    pixel_unshuffle channel_shuffle grid_sample affine_grid avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d max amax min amin maximum minimum fmax fmin topk sort msort kthvalue median
    cummax cummin abs absolute abs_ nan_to_num nan_to_num_ requires_grad_ detach detach_ numpy
    real imag view_as_real view_as_complex complex conj resolve_conj resolve_neg
    fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn fft_fft fft_ifft fft_rfft fft_irfft fft_fftn fft_ifftn
    align_to pin_memory data_ptr size dim numel stride item tolist __len__ __bool__ __contains__ ndimension
    is_floating_point is_complex get_device element_size storage_offset is_contiguous register_hook retain_grad
    __format__ __repr__ __hash__ __deepcopy__ untyped_storage swapaxes_ unsqueeze_ squeeze_ transpose_ t_""".split()
)
"""Operations whose plain gradient is right under every recipe: linear, or a selection among inputs."""


def linear(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation as it is, on constants that are detached."""
    if mode.book is not None:
        return mode.book.linear(func, args, kwargs)
    if not kwargs and PLAIN.issuperset(map(type, args)):  # nearly always
        return func(*args)
    return func(*constants(args), **constants(kwargs))


def _keeps_gate(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    return keep_gate(mode, linear(mode, func, args, kwargs), *args[:3])


def _shape(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    out = linear(mode, func, args, kwargs)
    if mode.recipe.product is rules.signal_take_all and isinstance(args[0], Tensor):
        strength = vars(args[0]).get(GATE)
        if strength is not None:
            setattr(out, GATE, strength)
    return out


for names, handler in ((LINEAR, linear), (KEEPS_GATE, _keeps_gate), (SHAPE, _shape)):
    HANDLERS.update(dict.fromkeys(names, handler))
