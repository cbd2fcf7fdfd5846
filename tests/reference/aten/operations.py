"""What each ATen operation is to the judge. What stands in no table is refused by name."""

LINEAR = frozenset(
    """
    view _unsafe_view reshape _reshape_alias view_as t transpose permute numpy_T movedim swapaxes expand unsqueeze
    squeeze slice select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind chunk unsafe_chunk cat stack
    hstack vstack clone contiguous _to_copy to lift positive conj _conj resolve_conj resolve_neg
    add sub rsub neg sum mean cumsum index _unsafe_index index_select gather take take_along_dim index_put
    _unsafe_index_put index_add index_copy index_fill scatter scatter_add slice_scatter select_scatter diagonal_scatter
    masked_fill masked_scatter where constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d pad roll flip repeat repeat_interleave tril triu diagonal diag_embed unfold im2col col2im
    avg_pool1d avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool1d upsample_bilinear2d upsample_bicubic2d
    upsample_nearest2d upsample_nearest1d upsample_linear1d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _fft_r2c _fft_c2r _fft_c2c view_as_real view_as_complex real imag complex copy masked_select
    pixel_shuffle pixel_unshuffle embedding channel_shuffle trace
    read write flat copied rot90 unfold_copy block_diag
    """.split()
)
"""Linear in all that depends on the input, taken together; checked on the numbers of each call."""

SELECTION = frozenset(
    """
    max min amax amin topk sort kthvalue median maximum minimum fmax fmin max_pool2d_with_indices
    max_pool1d_with_indices max_pool3d_with_indices adaptive_max_pool2d cummax cummin mode
    """.split()
)
"""Each output is one of the inputs, which gets the relevance (winner takes all: the gradient)."""

BILINEAR = {
    "mul": (0, 1),
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "vdot": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "addmv": (1, 2),
    "addr": (1, 2),
    "addcmul": (1, 2),
    "convolution": (0, 1),
    "_convolution": (0, 1),
    "outer": (0, 1),
    "ger": (0, 1),
    "linear": (0, 1),
    "matmul": (0, 1),
    "div": (0, 1),
    "true_divide": (0, 1),
}
"""Products, and which two arguments are the factors (in a division the second counts as one over it); the others are
added."""

ADDING = frozenset("addmm baddbmm addbmm addmv addr addcmul".split())
"""Those that add it to their first argument."""

MATRIX = frozenset(BILINEAR) - {"mul", "div", "true_divide", "addcmul", "outer", "ger", "addr"}
"""Those of them that sum products."""

FUNCTIONS = frozenset(
    """
    gelu silu relu relu6 tanh sigmoid exp exp2 expm1 erf erfc sqrt rsqrt reciprocal log log2 log10 log1p pow square abs
    sin cos tan asin acos atan sinh cosh asinh acosh atanh softplus elu selu celu leaky_relu hardtanh hardswish
    hardsigmoid hardshrink softshrink tanhshrink softsign mish log_sigmoid_forward log_sigmoid logsigmoid threshold
    clamp clamp_min clamp_max _prelu_kernel prelu rrelu_with_noise sinc erfinv logit nan_to_num
    """.split()
)
"""Element-wise functions of one tensor; other tensors among their arguments are constants, or else they are refused."""

BOUNDS = frozenset("clamp clamp_min clamp_max".split())
KEEPS = frozenset("pow square sqrt abs relu leaky_relu".split())
"""Functions of a gate that are no weaker one."""

SOFTMAXES = frozenset({"_softmax", "_safe_softmax"})
OF_ONE_SIGN = frozenset("sigmoid hardsigmoid softplus log_sigmoid_forward erfc cosh".split()) | SOFTMAXES
"""Functions of one sign everywhere: what they give says how much, and nothing else."""

EXPONENTIALS = frozenset({"exp", "exp2"})
QUOTIENTS = frozenset({"div", "true_divide"})
SUMMATIONS = frozenset({"add", "sub", "rsub"})

SAME = frozenset("clone contiguous _to_copy copy copied".split())
"""What does nothing at all to the numbers."""

SHAPES = SAME | frozenset(
    "view _unsafe_view reshape _reshape_alias view_as t transpose permute numpy_T movedim swapaxes expand squeeze "
    "unsqueeze flat".split()
)
"""What gives a tensor another shape."""

SELECTS = frozenset(
    """
    slice select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind chunk unsafe_chunk index
    _unsafe_index index_select gather take take_along_dim repeat repeat_interleave roll flip topk sort tril triu
    masked_fill read pad constant_pad_nd
    """.split()
)
"""What selects of one tensor, once or many times, or puts constants beside it."""

JOINS = frozenset(
    """
    cat stack hstack vstack where index_put _unsafe_index_put index_copy index_fill scatter slice_scatter
    select_scatter diagonal_scatter masked_scatter write max min amax amin maximum minimum fmax fmin cummax cummin
    kthvalue median mode diagonal diag_embed unfold im2col block_diag masked_select max_pool1d_with_indices
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d nan_to_num
    pixel_shuffle pixel_unshuffle channel_shuffle col2im reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d
    """.split()
)
"""What puts tensors together, or takes the one or the other."""

SCALINGS = frozenset("mul div true_divide neg".split())
"""What scales, where only the first or the other of two carries relevance."""

POOLS = frozenset(
    """
    sum mean cumsum index_add scatter_add scatter_reduce trace
    avg_pool1d avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool1d
    upsample_bilinear2d upsample_bicubic2d upsample_nearest2d upsample_nearest1d upsample_linear1d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa native_layer_norm native_group_norm _fused_rms_norm
    native_batch_norm _native_batch_norm_legit_no_training
    """.split()
)
"""What sums with constant weights that are no layer's; a norm too, for what divides is a constant."""

NORMALISERS = frozenset("rsqrt reciprocal".split())
"""What divides: a constant, if it is no function of what it divides."""

LENGTHS = {"norm": 1, "linalg_vector_norm": 1, "std": 1, "var": 2}
"""How long something is, or how it varies, with the degree it is homogeneous of: a sum of squares, or its root;
functions that hand on all they are given. Where one divides, it is a constant."""

STEPS = frozenset("sign sgn round floor ceil trunc".split())
"""Constant almost everywhere."""
