"""The operations that need no rule: their plain gradient is right under every recipe.

They are linear without weights (sums, shapes, pooling), or a selection among their inputs (``max``, ``topk``,
``where``), or no computation at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from lrpx import rules
from lrpx.engine import _casts, _combined, _exponentials, _inverses, _joined, _selections, _steps, _sums
from lrpx.engine._gates import EXPONENTS, gate_strength, keep_gate, move_gate, put_gate, takes_all
from lrpx.engine._operation import Operation, as_it_is, changes_in_place, write
from lrpx.engine._tensors import CONSTANT, TRANSPOSES, any_carries, arguments, called, carries, constants, is_in_place
from lrpx.errors import UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine._operation import Gate, Handler
    from lrpx.engine._run import Run


def plain(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation as it is."""
    return called(func, args, kwargs)


def moving(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation as it is; of ids of tokens, ids."""
    out = plain(run, func, args, kwargs)
    if type(out) is Tensor and not out.requires_grad:
        for each in args:
            run.computed(out, each)
        run.computed(out, *kwargs.values())
    return out


def stack(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors put beside one another; perhaps to be multiplied, as the gate and the signal, or by constants."""
    out = moving(run, func, args, kwargs)
    if carries(out):
        parts, dim = arguments(args, kwargs, "tensors", "dim")
        parts = [x.detach() if hasattr(x, CONSTANT) or isinstance(x, Parameter) else x for x in parts]
        if run.asks_for_gates or _combined.are_apart(run) or not all(map(carries, parts)):
            _joined.stacked(out, parts, dim or 0)
    return out


def linear_in_first(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """What is linear in its first argument, and in no other: a scaling, an integral, a quantile of a level."""
    args, kwargs = constants(args), constants(kwargs)
    if any_carries((*args[1:], *(value for name, value in kwargs.items() if name not in ("input", "y")))):
        why = f"{func.__name__} with more than its first argument that depends on the input"
        return as_it_is(run, why, func, args, kwargs)
    return func(*args, **kwargs)


def reducing(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum, mean or selection by index; a product of what falls together is none."""
    args, kwargs = constants(args), constants(kwargs)
    how = kwargs.get("reduce", next((each for each in args if isinstance(each, str)), ""))
    if how in ("prod", "multiply") and any_carries((*args, *kwargs.values())):
        return as_it_is(run, f"{func.__name__} with reduce={how}", func, args, kwargs)
    if kwargs.get("initial") is not None and any_carries((*args, *kwargs.values())):
        return as_it_is(run, f"{func.__name__} with initial (leave it out)", func, args, kwargs)
    return run.added_by_ids(func(*args, **kwargs), *args, *kwargs.values())


def adding_by_index(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum of what has the same index."""
    return run.added_by_ids(plain(run, func, args, kwargs), *args, *kwargs.values())


def counting(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """How often each number is there."""
    return run.added_by_ids(leaving(run, func, args, kwargs), *args, *kwargs.values())


def copy(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """One tensor in the place of another: what was known of that is of no matter."""
    x, value = arguments(args, kwargs, "self", "src")[:2]
    if carries(value) and value.shape == x.shape and value.dtype == x.dtype:
        return write(run, x, value)
    out = plain(run, func, args, kwargs)
    if run.asks_for_gates:
        put_gate(run.recipe, out, gate_strength(value) if carries(value) else 0)
    return out


def without_gradient(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """What has no derivative, for it is of no floating point or a new tensor: a comparison, an index, zeros."""
    return func(*(each.detach() if isinstance(each, Tensor) else each for each in args), **constants(kwargs))


def uniform(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor of one number."""
    return _steps.uniform(without_gradient(run, func, args, kwargs))


def compared(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A comparison that may tell signs, or a constant that may be compared."""
    return _steps.keep(func, without_gradient(run, func, args, kwargs), *args, **kwargs)


def leaving(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Numbers that nothing follows."""
    run.leaving_ids(func.__name__, *args)
    return plain(run, func, args, kwargs)


def ordering(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Some of what is in a tensor, in another order, and perhaps where it was; of ids of tokens, ids."""
    out = plain(run, func, args, kwargs)
    if not any_carries(out):
        run.computed(out[0] if isinstance(out, tuple) else out, *args[:1], *kwargs.values())
    return out


def searching(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Where something is in a sorted table; of ids of tokens, ids."""
    return run.computed(without_gradient(run, func, args, kwargs), *args, *kwargs.values())


def largest(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Where the largest number is; of one-hot ids, the ids."""
    out = without_gradient(run, func, args, kwargs)
    x = args[0] if args else kwargs["input"]
    if out.shape == x.shape[:-1]:
        run.computed(out, getattr(x, _casts.ONE_HOT, None))
    return out


def grid_sample(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The weights of an interpolation choose among its places, as a gate does: a grid that depends on the input is a
    constant, and the signal takes all."""
    mode = "mode" if func is F.grid_sample else "interpolation_mode"
    names = ("input", "grid", mode, "padding_mode", "align_corners")
    x, grid, *rest = arguments(constants(args), constants(kwargs), *names)
    settings = {name: value for name, value in zip(names[2:], rest, strict=True) if value is not None}

    def op(x: Tensor, grid: Tensor) -> Any:
        return func(x, grid, **settings)

    rule = run.recipe.product
    if not carries(grid):
        return op(x, grid)
    if rule is rules.unmodified:
        return run.apply("product", op, x, grid)
    if rule not in (rules.uniform, rules.signal_take_all, rules.constant):
        raise run.refuse_rule("product", func.__name__, "which hides its products from a rule")
    run.under("product")
    return op(x.detach() if rule is rules.constant else x, grid.detach())


def attribute(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A property of a tensor, or what is one of its operations without brackets."""
    if func.__self__.__name__ not in TRANSPOSES:
        return func(*args)
    x = args[0]
    if type(x) is Parameter:
        return func(x.detach())
    out = move_gate(func(x), x)
    if run.has_scales:
        _exponentials.keep_exponents(func.__self__.__get__, out, (x,), {})
    return out


def hook(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The model's own hook of a gradient may look at it; one that changes it (to train slower) would change relevance.

    Raises:
        UnknownOperationError: in the backward pass, the hook gives another gradient, and the recipe has rules.
    """
    x, given = arguments(args, kwargs, "self", "hook")
    if not (run.recipe.has_rules() and run.recipe.strict):
        return func(x, given)
    where = run.where()

    def looking(gradient: Tensor) -> None:
        if given(gradient) is not None:
            raise UnknownOperationError(
                f"{where} changes a gradient by a hook of its own, with torch's 'register_hook', which would "
                "change the relevance too; let it do so in training mode only, or use a recipe with strict=False"
            )

    return func(x, looking)


def embedding(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A look-up: a leaf of the graph, unless what is looked up in was computed."""
    given: tuple[Any, ...] = (*args[:2], *(kwargs[n] for n in ("input", "indices", "weight") if n in kwargs))
    ids, weight = given
    if ids.is_floating_point():  # torch.embedding has the weight first
        ids, weight = weight, ids
    factors = constants((*args[2:], kwargs.get("per_sample_weights")))
    if any_carries(factors):
        why = f"{func.__name__} with per_sample_weights that depend on the input"
        return as_it_is(run, why, func, constants(args), constants(kwargs))
    if weight.requires_grad and not weight.is_leaf and any(_is_given(func, args, kwargs, name) for name in NOT_LINEAR):
        why = f"{func.__name__} in a table that depends on the input, with one of {', '.join(NOT_LINEAR)}"
        return as_it_is(run, why, func, constants(args), constants(kwargs))
    out = func(*constants(args), **constants(kwargs))
    if not weight.requires_grad or weight.is_leaf or run.is_foreign(weight):
        return run.source(weight, ids, out)
    return keep_gate(run.recipe, out, weight) if run.asks_for_gates else out


def index(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A selection; of the rows of a table by the ids of tokens, a look-up as an embedding's is."""
    x, at = args
    if type(x) is Tensor and x.requires_grad and type(at) is not Parameter and not hasattr(x, EXPONENTS):
        return func(x, at)  # nearly always
    if (
        type(at) is list
        and set(map(type, at)) == {int}
        and x.is_floating_point()
        and (isinstance(x, Parameter) or not x.requires_grad)
    ):
        ids = run.listed_ids(at, is_first=isinstance(x, Parameter) and not run.sources)
        if ids is not None:
            return run.source(x, ids, func(x.detach(), at))
    if not x.is_floating_point():
        return run.computed(func(x, at), x, at)
    if type(x) is not Tensor and isinstance(x, Parameter):  # the first is the cheaper question
        if (place := _lookup(at, run.is_lookup)) is not None:
            return _looked_up(run, x, func(x.detach(), at), *place)
    elif not x.requires_grad and x.is_floating_point() and not run.is_by_ids(x):
        if type(at) is Tensor and _is_identity(x) and run.is_lookup(at):
            return run.source(x, at, func(x, at), "one_hot")
        if (place := _lookup(at, run.is_given)) is not None:
            return _looked_up(run, x, func(x, at), *place)
        if x.ndim == 1 and hasattr(at, _steps.STEP):  # which of several constants, by the signs of something
            return _steps.keep(lambda at: x[at.long()], func(x, at), at)
    return _exponentials.plain_of_exponentials(run, func, args, kwargs)


def _lookup(at: Any, is_lookup: Callable[[Any], bool]) -> tuple[Tensor, int] | None:
    """The ids that a table is looked up with, and the dimension of the result that they begin at, counted from its end
    if it is negative; None where anything but slices is beside them."""
    if type(at) is Tensor:
        return (at, 0) if is_lookup(at) else None
    if type(at) is not tuple or not all(type(each) is slice or each is ... or type(each) is Tensor for each in at):
        return None
    places = [i for i, each in enumerate(at) if type(each) is Tensor]
    if len(places) != 1 or not is_lookup(at[places[0]]):
        return None
    ids, before = at[places[0]], at[: places[0]]
    return ids, -len(at[places[0] + 1 :]) - ids.ndim if ... in before else len(before)


def _looked_up(run: Run, table: Tensor, out: Tensor, ids: Tensor, dim: int) -> Tensor:
    """The result of a look-up, as a leaf whose first dimensions are those of the ids."""
    dim = dim % out.ndim if dim else 0
    if not dim:
        return run.source(table, ids, out)
    places = tuple(range(dim, dim + ids.ndim))
    rows = run.source(table, ids, out.movedim(places, tuple(range(ids.ndim))))
    return rows.movedim(tuple(range(ids.ndim)), places)


def index_select(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A selection along a dimension; of the rows of a table by the ids of tokens, a look-up."""
    x, dim, ids = arguments(args, kwargs, "input", "dim", "index")
    if _is_table(run, x, ids):
        return _looked_up(run, x, func(x.detach(), dim, ids), ids, dim % x.ndim)
    return moving(run, func, args, kwargs)


def gather(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A selection along a dimension; of a table by the ids of tokens, repeated for all of a row, a look-up."""
    out = moving(run, func, args, kwargs)
    x, dim, ids = arguments(args, kwargs, "input", "dim", "index" if func.__name__ == "gather" else "indices")
    if isinstance(ids, int):  # take_along_dim has the indices before the dimension
        dim, ids = ids, dim
    if takes_all(run.recipe) and carries(out):
        _combined.mark_chosen(run, out, _joined.parts_of(x, dim), lambda parts, _: parts)
    if not carries(out) and _is_table(run, x, ids):
        while ids.ndim > 1 and (ids.stride(-1) == 0 or ids.shape[-1] == 1):
            ids = ids.select(-1, 0)
        return run.source(x, ids, out)
    return out


def _is_table(run: Run, x: Tensor, ids: Any) -> bool:
    """Whether ``x`` is a table that tokens are looked up in with these ids."""
    if isinstance(x, Parameter):
        return run.is_lookup(ids)
    return not x.requires_grad and x.is_floating_point() and run.is_given(ids) and not run.is_by_ids(x)


def _is_identity(x: Tensor) -> bool:
    """Whether a tensor is an identity matrix, whose rows are one-hot."""
    return (
        x.ndim == 2
        and x.shape[0] == x.shape[1] > 1
        and x.is_floating_point()
        and not x.requires_grad
        and torch.equal(x, torch.eye(len(x), dtype=x.dtype, device=x.device))
    )


def one_hot(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Ids, each as a row with a single 1."""
    out = func(*args, **kwargs)
    ids = args[0] if args else next(iter(kwargs.values()))
    if run.is_lookup(ids):
        setattr(out, _casts.ONE_HOT, ids)
    return out


def equal(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A comparison; of ids with each number there is, they are one-hot."""
    out = without_gradient(run, func, args, kwargs)
    if len(args) == 2 and isinstance(args[1], Tensor) and out.ndim:
        for ids, numbers in (args, args[::-1]):
            if ids.ndim == out.ndim and ids.shape[-1] == 1 and run.is_given(ids) and _counts(numbers, out.shape[-1]):
                setattr(out, _casts.ONE_HOT, ids.squeeze(-1))
    return out


def _counts(numbers: Tensor, end: int) -> bool:
    return numbers.numel() == end > 1 and torch.equal(numbers.flatten(), torch.arange(end, device=numbers.device))


def scatter(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Numbers written along a dimension; a 1 at the ids of tokens among zeros, and they are one-hot."""
    x, dim, ids, value = arguments(args, kwargs, "input", "dim", "index", "src" if "src" in kwargs else "value")
    is_one_hot = (
        type(x) is Tensor and type(value) in (int, float) and value == 1 and run.is_given(ids)
        and dim % x.ndim == x.ndim - 1 and ids.shape == (*x.shape[:-1], 1) and not x.any()
    )  # fmt: skip
    out = reducing(run, func, args, kwargs)
    return _one_hot(run, x, out, ids.squeeze(-1)) if is_one_hot else out


def put(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Something written into a tensor; a 1 at the ids of tokens among zeros, and they are one-hot."""
    x, at, value = arguments(args, kwargs, "input", "indices", "values")
    ids: Any = at[-1] if type(at) in (tuple, list) and at else None
    is_one_hot = (
        type(x) is Tensor and run.is_given(ids) and not x.requires_grad
        and isinstance(value, (int, float, Tensor)) and bool((torch.as_tensor(value) == 1).all())
        and ids.shape == x.shape[:-1] and not x.any()
    )  # fmt: skip
    is_zero = type(value) in (int, float) and value == 0
    if is_zero and type(at) is Tensor and at.dtype is torch.bool and at.shape == x.shape:  # x[mask] = 0
        whole = _selections.zeroed(run, x, at)
        if whole is not None:
            return write(run, x, whole)
    root = _selections.written_zeros(run, x, at, in_place=is_in_place(func.__name__)) if is_zero else None
    system = _inverses.before_a_row(x, at)
    out = plain(run, func, args, kwargs)
    if system is not None:
        _inverses.written(run, x, system)
    if root is not None:
        _selections.kinked(run, x if out is None else out, root, x, at)
    if type(x) is Tensor and not x.requires_grad:
        run.computed(x if out is None else out, value)
    return _one_hot(run, x, x if out is None else out, ids) if is_one_hot else out


def _one_hot(run: Run, x: Tensor, out: Tensor, ids: Tensor) -> Tensor:
    """``out``, one-hot ids, which may have been written into ``x``: a source, if it is floating-point."""
    if not out.is_floating_point():
        setattr(out, _casts.ONE_HOT, ids)
        return out
    rows = run.source(x, ids, out, "one_hot")
    return x.copy_(rows) if out is x else rows


NOT_LINEAR = {"padding_idx": 2, "max_norm": 3, "scale_grad_by_freq": 5}
"""Settings of a look-up that give rows another gradient, or other values; and their places in ``F.embedding``."""


def _is_given(func: Any, args: Any, kwargs: Any, name: str) -> bool:
    if func is torch.embedding:  # which says -1 where there is none
        return name == "padding_idx" and kwargs.get(name, args[2] if len(args) > 2 else -1) >= 0
    place = NOT_LINEAR[name]
    value = kwargs.get(name, args[place] if len(args) > place else None)
    return value is not None and value is not False


def _each(
    names: str, gate: Gate | None = None, handler: Handler = plain, has_summands: bool = True, **facts: Any
) -> list[Operation]:
    return [
        Operation(name, (name,), handler, "plain", gate, has_summands=has_summands, **facts) for name in names.split()
    ]


MOVES = _each(
    """chalf cfloat cdouble view reshape squeeze expand
    transpose permute swapaxes swapdims movedim moveaxis t flatten unflatten ravel adjoint dropout alpha_dropout
    feature_alpha_dropout dropout1d dropout2d dropout3d cpu cuda atleast_1d atleast_2d atleast_3d sum_to_size
    as_tensor asarray alias_copy expand_copy permute_copy squeeze_copy t_copy transpose_copy unsqueeze_copy
    view_copy""",
    "moves",
) + _each("view_as reshape_as expand_as", "moves", has_summands=False)
MOVES += _each("type", "moves", _casts.cast_or_name)
MOVES += _each("float half bfloat16 double clone contiguous", "moves", _casts.plain_scaling)
MOVES += _each("long int short", None, _casts.plain_scaling, has_summands=False)
MOVES += _each("to type_as", "moves", _casts.plain_scaling, has_summands=False)
MOVES += _each("unsqueeze", "moves", _exponentials.plain_of_exponentials)

SUMS = [
    Operation("add", ("add", "__add__", "__radd__"), _sums.plain_sum, "plain", "stays", numbers=(1,)),
    Operation("add", ("add_", "__iadd__"), _sums.plain_sum, "plain", "joins", numbers=(1,)),
    Operation("sub", ("sub", "subtract", "__sub__"), _sums.plain_sum, "plain", "stays", numbers=(1,)),
    Operation("sub", ("sub_", "__isub__", "subtract_"), _sums.plain_sum, "plain", "joins", numbers=(1,)),
    Operation("rsub", ("rsub",), _sums.plain_sum, "plain", "stays", numbers=(1,)),
]

SELECTS = (
    _each(
        """chunk split tensor_split split_with_sizes unbind unsafe_chunk unsafe_split narrow select
        broadcast_to deg2rad
        rad2deg split_with_sizes_copy unbind_copy tril triu""",
        "stays",
    )
    + _each("repeat repeat_interleave tile roll flip pad", "stays", moving)
    + _each("topk sort", "stays", ordering)
    + _each("diag diag_embed diagflat", "joins", _joined.diagonal)
    + _each("stack", "joins", stack)
    + _each("copy_", None, copy)
    + _each("index_select", "stays", index_select)
    + _each("gather take_along_dim", "stays", gather)
    + _each("neg negative __neg__", "stays", _casts.plain_scaling)
    + _each("masked_fill masked_fill_", "joins", _selections.filled, numbers=(2,))
    + _each("where", None, _selections.plain_where, numbers=(1, 2))
    + _each(
        """cat concat concatenate hstack vstack dstack column_stack row_stack fliplr flipud take masked_scatter
        masked_select _pad constant_pad_nd""",
        "joins",
        moving,
    )
    + _each("amax amin", "joins", _selections.extreme)
    + _each(
        """hsplit vsplit dsplit narrow_copy
        slice block_diag meshgrid index_copy put
        diagonal diagonal_copy diagonal_scatter slice_scatter select_scatter linalg_diagonal
        rot90 unfold unfold_copy im2col as_strided as_strided_copy
        pixel_shuffle pixel_unshuffle channel_shuffle
        max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
        aminmax msort kthvalue median nanmedian
        mode cummax cummin nan_to_num __pos__ positive cartesian_prod combinations fill_diagonal_ fold col2im
        real imag view_as_real view_as_complex complex conj conj_physical resolve_conj resolve_neg
        _pack_padded_sequence _pad_packed_sequence""",
        "joins",
    )
    + _each("broadcast_tensors", "joins", has_summands=False)
    + _each("__setitem__ index_put index_put_", "joins", put, numbers=(2,))
    + _each("index_fill index_fill_", "joins", numbers=(3,))
    + _each("scatter scatter_", "joins", scatter)
)

OTHERS = (
    _each(
        """zero_ affine_grid
        requires_grad_ detach_
        fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn
        fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2
        fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift
        align_to pin_memory data_ptr size dim numel stride __len__ __bool__ __contains__ ndimension
        is_floating_point is_complex get_device element_size storage_offset is_contiguous retain_grad
        __format__ __repr__ __hash__ __deepcopy__ untyped_storage"""
    )
    + _each("item tolist numpy __array__ __int__ __index__ __float__ histc", handler=leaving)
    + _each("bincount", handler=counting)
    + _each("unique _unique2 unique_dim unique_consecutive", handler=ordering)
    + _each("fill fill_", numbers=(1,))
    + _each("scatter_reduce scatter_reduce_ index_reduce index_reduce_", "joins", handler=reducing)
    + _each("segment_reduce _segment_reduce", "joins", handler=reducing)
    + _each("grid_sample grid_sampler grid_sampler_2d grid_sampler_3d", has_summands=False, handler=grid_sample)
    + _each(
        "ldexp stft istft gradient trapz trapezoid cumulative_trapezoid quantile nanquantile",
        has_summands=False,
        handler=linear_in_first,
    )
    + _each("sum", "joins", _exponentials.plain_of_exponentials)
    + _each("index_add scatter_add", "joins", adding_by_index)
    + _each(
        """mean nansum nanmean cumsum diff trace interpolate upsample _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
        adaptive_avg_pool3d""",
        "joins",
    )
)

COMPARED = """gt ge lt le greater greater_equal less less_equal ne not_equal logical_and logical_or logical_xor
logical_not"""

WITHOUT_GRADIENT = (
    _each(
        """equal allclose isclose isnan isinf isfinite isneginf isposinf isreal all any argmin
    argsort nonzero argwhere count_nonzero empty_like rand_like
    randn_like randint_like new_empty new_empty_strided
    new_tensor""",
        handler=without_gradient,
        has_summands=False,
    )
    + _each("zeros_like ones_like full_like new_zeros new_ones new_full", handler=uniform, has_summands=False)
    + _each(
        f"{COMPARED} signbit bitwise_not __invert__ bitwise_and __and__ bitwise_or __or__",
        handler=compared,
        has_summands=False,
    )
    + _each("bucketize searchsorted", handler=searching, has_summands=False)
    + _each("argmax", handler=largest, has_summands=False)
    + [
        Operation(f"{name}_", (f"{name}_",), changes_in_place(without_gradient, getattr(Tensor, name)), "plain")
        for name in ("eq", *COMPARED.split())
    ]
)

ROWS = [
    *MOVES, *SUMS, *SELECTS, *OTHERS, *WITHOUT_GRADIENT,
    Operation("__getitem__", ("__getitem__",), index, "plain", "stays"),
    Operation("one_hot", ("one_hot",), one_hot, "plain"),
    Operation("eq", ("eq", "__eq__"), equal, "plain", has_summands=False),
    Operation("attribute", ("__get__",), attribute, "plain"),
    Operation("detach", ("detach",), compared, "plain", has_summands=False),
    Operation("hook", ("register_hook",), hook, "plain", has_summands=False),
    Operation("embedding", ("embedding", "embedding_bag"), embedding, "source"),
]  # fmt: skip
