"""What its user has put into a model of transformers, of which nothing is known."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import lru_cache, partial
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as nn_module

from lrpx._modules import base_model, kept_in_running, named_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

THEIRS = ("torch.", "transformers.")
"""How the paths begin of what is no user's own."""
WRAPPERS = (*THEIRS, "accelerate.", "safetensors.", "lrpx.")
"""And of what moves weights or listens, and is a hook, or in the place of a forward."""
MODELS = "transformers.models."
"""And those of the classes that one of its models is written with."""
PYTHONS = sys.stdlib_module_names | {"typing_extensions"}
"""And the first names of those of Python's own modules."""
FLAGS: frozenset[type] = frozenset({bool, str, type(None)})
"""What a flag is. Numbers are none: a model may count its calls, or keep the length of its last text."""
NUMBERS: frozenset[type] = frozenset({int, float})
SETTINGS: frozenset[type] = frozenset({dict, SimpleNamespace, Namespace})
"""What holds settings, beside dataclasses,"""
DEEP = 3
"""and these in one another."""
OF_ALL = frozenset(vars(Module())) - {"training"}
"""What each module has besides."""
LOOKED_AT = 64
"""So many numbers of a tensor tell, about, whether it is another."""
TOLD = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)
"""Where transformers keeps what it was told of, by the name of an implementation of attention."""


def is_theirs(model: Module) -> bool:
    """Whether a model, without what adapters have put around it, is one of transformers."""
    return type(base_model(model)).__module__.startswith("transformers.")


def changes(model: Module) -> tuple[object, ...]:
    """What its user has put into a model, each by what is another for another: modules, forwards and other methods of
    other packages than torch and transformers, an instance's or a class's, functions in the place of those that a model
    of transformers calls by their names, attention functions and masks that transformers was told of, and hooks, of a
    module or of all there are. Nothing is known of what these read."""
    found: list[object] = []
    configs: dict[int, Any] = {}
    classes: dict[type[Module], frozenset[str] | None] = {}
    for _, module in named_modules(model):  # as cheap as can be, for a short text would notice
        held, kind = vars(module), type(module)
        if kind not in classes:
            classes[kind] = _methods(kind) if kind.__module__.startswith(THEIRS) else None  # type: ignore[arg-type]
        names = classes[kind]
        if names is None:
            found.append((kind, module))
        elif names and not names.isdisjoint(held):
            found += [("method", held[name]) for name in sorted(names & held.keys()) if _is_put_in(held[name])]
        if "forward" in held and not home_of(held["forward"]).startswith(WRAPPERS):
            found.append(("forward", held["forward"]))
        if held["_forward_hooks"] or held["_forward_pre_hooks"]:
            found += [("hook", each) for each in users_hooks(module)]
        if "config" in held:
            configs[id(held["config"])] = held["config"]
    found += [("hook", each) for each in _everywhere()]
    known = [kind for kind, names in classes.items() if names is not None]
    forwards = [kind.forward for kind in known]
    found += [("forward", each) for each in forwards if not home_of(each).startswith(WRAPPERS)]
    for each in dict.fromkeys(each for kind in known for each in kind.__mro__):
        if each.__module__.startswith(MODELS):
            found += [("method", method) for method in vars(each).values() if _is_put_in(method)]
    for home in dict.fromkeys(kind.__module__ for kind in known):
        called = vars(sys.modules[home]).values() if home.startswith("transformers.") and home in sys.modules else ()
        found += [("function", each) for each in called if _is_function(each) and _is_users(each)]
    kinds = {getattr(config, "_attn_implementation", None): None for config in configs.values()}
    for path, name in TOLD:
        told: Any = getattr(sys.modules.get(path), name, {})
        given = [(kind, told[kind]) for kind in kinds if isinstance(kind, str) and kind in told]
        found += [each for each in given if not home_of(each[1]).startswith(THEIRS)]
    return tuple(found)


def state(model: Module) -> tuple[object, ...]:
    """What may become another with nothing put into a model: its :func:`flags`, and the numbers of its weights, trained
    or loaded, by their versions and where they are; of a module of one's own some of its weights' and buffers' numbers
    too, for what is written through ``.data``, and into buffers, has no version that tells, and of the numbers and the
    tensors that it holds besides, but for what it sets as it runs. Weights that wait elsewhere (``accelerate``) are not
    known."""
    found: list[object] = [*flags(model)]
    tensors: list[Tensor] = []
    for _, module in named_modules(model):
        held = vars(module)
        weights = [each for each in held["_parameters"].values() if each is not None and not each.is_meta]
        found += [(id(each), None if each.is_inference() else each._version, _address(each)) for each in weights]
        if not type(module).__module__.startswith(THEIRS):
            kind: Any = type(module)
            kept = kept_in_running(kind)
            own = {name: each for name, each in held.items() if name not in kept and name not in OF_ALL}
            found += _plain(own, NUMBERS)
            tensors += [each for each in own.values() if isinstance(each, Tensor)]
        tensors += [*weights, *(each for each in held["_buffers"].values() if each is not None)]
    return (*found, *([] if is_theirs(model) else _looked_at(tensors)))


def flags(model: Module, *, numbers: bool = False) -> tuple[object, ...]:
    """The flags of modules that are neither torch's nor transformers', and of settings that these hold, and lists of
    such, as of an adapter's names; whether an attention looks ahead; and what configs hold of them, and of numbers.

    Args:
        model: the user's module.
        numbers: whether modules' numbers are wanted, too: they may be how many heads there are, or count calls.
    """
    found: list[object] = []
    configs: dict[int, Any] = {}
    kinds = FLAGS | NUMBERS if numbers else FLAGS
    for _, module in named_modules(model):
        held = vars(module)
        if not type(module).__module__.startswith(THEIRS):
            found += _plain({name: each for name, each in held.items() if name not in OF_ALL}, kinds)
        elif "is_causal" in held:
            found.append(held["is_causal"])
        if "config" in held:
            configs[id(held["config"])] = held["config"]
    for config in configs.values():
        told: Mapping[str, Any] = getattr(config, "__dict__", {})
        found += _plain({name: each for name, each in told.items() if not name.startswith("_")}, FLAGS | NUMBERS, 0)
    return tuple(found)


def _plain(held: Mapping[Any, Any], kinds: frozenset[type], deep: int = DEEP) -> list[object]:
    """Of what an object holds, what is of these kinds, and lists of nothing else; and the same of settings in it."""
    found: list[object] = []
    for name, value in held.items():
        if type(value) in kinds:
            found.append((name, type(value), value))
        elif type(value) in (list, tuple) and all(type(each) in kinds for each in value):
            found.append((name, *value))
        elif deep and (type(value) in SETTINGS or hasattr(type(value), "__dataclass_fields__")):
            inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            found.append((name, *_plain(inside, kinds, deep - 1)))
    return found


def _address(tensor: Tensor) -> int | None:
    return tensor.data_ptr() if _has_memory(tensor) else None


def _has_memory(tensor: Tensor) -> bool:
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def _looked_at(tensors: Iterable[Tensor]) -> list[bytes]:
    """Some numbers of each tensor, evenly spread, as they are in memory."""
    bits: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for each in tensors:
            if _has_memory(each) and each.numel():
                step = each.numel() // LOOKED_AT | 1  # an odd one, not to stay in one column of a table
                size = (-(-each.numel() // step),) if each.is_contiguous() else (1,)
                some = each.detach().as_strided(size, (step,), each.storage_offset())
                bits.setdefault(each.device, []).append(some.contiguous().view(torch.uint8))
        return [torch.cat(each).cpu().numpy().tobytes() for each in bits.values()]


@lru_cache(maxsize=4096)
def _methods(kind: type[Module]) -> frozenset[str]:
    """What a class of transformers' models calls its methods, but for ``forward``."""
    bases = [vars(each) for each in kind.__mro__ if each.__module__.startswith(MODELS)]
    return frozenset(name for each in bases for name, value in each.items() if type(value) is FunctionType) - {
        "forward"
    }


def _is_put_in(method: object) -> bool:
    """Whether a method, of a class or an instance, is its user's."""
    held = getattr(method, "__func__", method)
    return type(held) is FunctionType and _is_users(held)


def _is_function(value: object) -> bool:
    return type(value) is FunctionType or (callable(value) and not isinstance(value, type))


def _is_users(function: Any) -> bool:
    """Whether a function is of none of the packages that a model of transformers is written with."""
    return not _is_known(home_of(function))


def users_hooks(module: Module) -> list[Any]:
    """The forward hooks of a module that are its user's: what they read, and do, nobody knows."""
    return _foreign(module._forward_hooks, module._forward_pre_hooks)


def _everywhere() -> list[Any]:
    """The hooks of all modules there are that are a user's."""
    return _foreign(nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)


def _foreign(*held: Mapping[int, Any]) -> list[Any]:
    return [each for hooks in held for each in hooks.values() if not home_of(each).startswith(WRAPPERS)]


def home_of(function: Any) -> str:
    """The module that a function, or its class, is from; or where it was written, or one that it calls, if that is
    neither torch's, transformers' nor Python's own: what is put in another's place may say that it is from there, too
    (``functools.wraps``)."""
    said = str(getattr(function, "__module__", None) or type(function).__module__)
    if type(function) is FunctionType and not function.__dict__ and function.__globals__.get("__name__") == said:
        return said
    return next((home for home in (said, *_written(function)) if not _is_known(home)), said)


def _written(function: Any) -> Iterator[str]:
    """Where a function was written, and those that it calls in its turn, as far as it tells."""
    left, met = [function], set()
    while left:
        function = left.pop()
        function = getattr(function, "__func__", function)
        if function is None or id(function) in met:
            continue
        met.add(id(function))
        is_function = type(function) is FunctionType
        home = function.__globals__.get("__name__") if is_function else type(function).__module__
        yield home or "torch"  # which makes functions that have no home
        left += [getattr(function, "__wrapped__", None), function.func if isinstance(function, partial) else None]


def _is_known(home: str) -> bool:
    return f"{home}.".startswith(WRAPPERS) or home.partition(".")[0] in PYTHONS


def is_believed(model: Module) -> bool:
    """Whether a model is one of transformers, made of modules that are there, too."""
    return type(model).__module__.startswith("transformers.") and not changes(model)


def around_head(model: Module) -> list[Module]:
    """A model's head and the modules it is in, the model first: each may make something of all the rows of logits."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, Module):
        return []
    path = next((path for path, module in named_modules(model) if module is head), "")
    names = path.split(".") if path else []
    return [model, *(model.get_submodule(".".join(names[:end])) for end in range(1, len(names))), head]


def head_is_hooked(model: Module) -> bool:
    """Whether a user's hook is at a model's head, or around it: it may read all rows, and is given them."""
    around = around_head(model)
    return bool(around) and bool(_everywhere() or any(map(users_hooks, around)))
