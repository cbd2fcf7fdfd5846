"""timm and zennit where torchvision is not installed: what they import of it, and do not need for a model, is empty."""

from __future__ import annotations

import importlib
import sys
import types
from contextlib import contextmanager
from unittest import mock

import pytest
import torch


class _Named(type):
    """A class that has every attribute, as an enumeration of modes has."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Anything(types.ModuleType):
    """A module in which every name is an empty class, so that it can be imported, derived from and be told apart."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder:
    """Finds torchvision, and all modules in it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)

    @staticmethod
    def create_module(spec):
        return _Anything(spec.name)

    @staticmethod
    def exec_module(module):
        module.__version__ = "0"


@contextmanager
def _stand_in():
    before = {name for name in sys.modules if name.partition(".")[0] == "torchvision"}
    with mock.patch.object(sys, "meta_path", [*sys.meta_path, _Finder]):
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        if name not in before:
            del sys.modules[name]


def imported(name):
    """A package, or the test is skipped."""
    try:
        with _stand_in():
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported here: {error}")
