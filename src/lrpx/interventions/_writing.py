"""The tap that writes or keeps what stands at some places, in a run of the engine or called by hooks.

It refuses a change that had no effect, and one that a checkpoint of the model's own would lose.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lrpx.errors import TraceError
from lrpx.interventions._sites import Site
from lrpx.interventions._where import edits_of, facing, refuse_picked, resolved
from lrpx.units._reading import AGAIN, Called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

    from torch.nn import Module

    from lrpx.engine import Running
    from lrpx.engine._places import Side
    from lrpx.interventions._where import Key, Wanted


def writing(model: Module, runs: Sequence[Mapping[Key, Wanted]], positions: Tensor) -> Writing:
    """A tap of a run in which each row of the batch is changed as its own run says.

    Args:
        model: the model that is called.
        runs: the changes of each row, as :func:`~lrpx.interventions.intervene` takes them; they may be none.
        positions: ``[B, W]``: where the batch's tokens stand in their texts, -1 for padding.

    Raises:
        InputError, MethodError, ModelError: as :func:`~lrpx.interventions.intervene`.
    """
    sites = []
    for row, changes in enumerate(runs):
        for place, wanted in resolved(model, changes) if changes else ():
            refuse_picked(model, place, "use lrpx.intervene, one run after another")
            sites.append(Site(facing(model, place), edits_of(place, wanted), row=row))
    return Writing(sites, positions)


def recording(model: Module, keepers: Mapping[Key, Callable[[Tensor], None]]) -> Writing:
    """A tap that gives each keeper what stands at its place, in every call of it."""
    return Writing(Site(place, [], keep) for place, keep in resolved(model, keepers))


class Writing(Called):
    """Changes what stands at some places, or keeps it: in a run that it is a tap of, or by hooks
    (:func:`~lrpx.interventions.intervene`).

    Args:
        sites: the places.
        positions: ``[B, W]``: where the tokens of a run stand in their texts, -1 for padding; of the hooks each scope
            has its own.
    """

    writes = True

    def __init__(self, sites: Iterable[Site], positions: Tensor | None = None) -> None:
        self.sites = tuple(sites)
        super().__init__(site.where.path for site in self.sites)
        self.places: dict[tuple[str, Side], list[Site]] = defaultdict(list)
        for site in self.sites:
            self.places[site.where.path, site.where.side].append(site)
        self._positions = positions
        self.needs_positions = any(site.needs_positions for site in self.sites)
        self.scopes: dict[str, Tensor | None] = {}
        self.begun = False
        self.keeps_graph = False  # whether the model was called with gradients on
        self._forgotten: set[str] = set()  # what a checkpoint of the model's own has run, and will run again
        self._over: set[str] = set()  # the places in what is called no more
        self._is_mixed = False  # whether others ran since then, whose tokens stand elsewhere

    def begin(self, run: Running) -> None:
        """A new run."""
        super().begin(run)
        self.begun = True

    def enter(self, within: Sequence[str], positions: Tensor | None) -> None:
        """A module that says which tokens run, the model or its encoder or decoder, is called, with these in it."""
        self.begun = True
        self.keeps_graph = torch.is_grad_enabled()
        self._over.difference_update(within)
        for path in within:
            self._is_mixed |= path in self._forgotten and not _is_equal(self.scopes.get(path), positions)
            self.scopes[path] = positions
            self._calls.pop((path, "input"), None)
            self._calls.pop((path, "output"), None)

    def leave(self, within: Sequence[str]) -> None:
        """The call of such a module is over: what is called in it by itself has other tokens."""
        self._over.update(within)

    def module(self, path: str, side: Side, value: Tensor) -> Tensor | None:
        """See :meth:`Called.module <lrpx.units.Called.module>`."""
        if self._run is not None or torch._C._current_graph_task_id() < 0:
            if self._run is None and self.keeps_graph and any(site.edits for site in self.places[path, side]):
                self._note_checkpoint(path, side, value)
            return super().module(path, side, value)
        # by a hook, in the backward pass: a checkpoint of the model's own, and what held for all calls holds again
        if any(site.where.call is not None for site in self.places[path, side]):
            raise TraceError(AGAIN.format(path))
        if self._is_mixed and self.needs_positions:
            raise TraceError(
                f"{path} runs again in the backward pass of a call of the model, and another call behind that had its "
                "tokens at other positions; call backward() before the next call, or switch the model's checkpoints off"
            )
        self._forgotten.discard(path)
        return self.at(path, side, 0, value)

    def _note_checkpoint(self, path: str, side: Side, value: Tensor) -> None:
        """Remember what runs in a checkpoint, until the backward pass has come to it."""
        found, is_whole = _checkpoint(self.places[path, side][0].where.holders[0])
        if not found or (is_whole and side == "output" and value.requires_grad):  # it need not be computed again
            return
        self._forgotten.add(path)
        if value.requires_grad:  # the part before it may be all that runs again
            value.register_hook(lambda _: self._forgotten.discard(path))  # type: ignore[no-untyped-call]

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """The value with the changes that are due."""
        positions = self.scopes.get(path, self._positions)
        if path in self._over and torch._C._current_graph_task_id() < 0:
            positions = None
        now = value
        for site in self.places.get((path, side), ()):
            if site.where.call not in (None, call):
                continue
            if site.row is None:
                after = site.value(now, positions)
                now = now if after is None else after
            else:
                assert positions is not None
                now = now.clone() if now is value else now
                site.write(site.row, now, positions)
        return None if now is value else now

    def refuse_unreached(self, name: str) -> None:
        """Refuse what had no effect in a model of this name.

        Raises:
            TraceError: the model was not called, or did not come to a place, or to a position.
        """
        if not (self.begun or any(site.reached for site in self.sites)):
            raise TraceError(f"{name} was not called in this block, so nothing in it was changed; call this very model")
        for site in self.sites:
            where = site.where
            if not site.reached:
                raise TraceError(
                    f"{name} did not come to the {where.side} of {where.name} in this block, as to an expert that no "
                    "token was given; choose another place"
                )
            if site.waiting:
                told = ", ".join(map(str, sorted(site.waiting)))
                raise TraceError(f"no text in this block had position {told} at {where.name}; count tokens from 0")
        if self._forgotten:
            raise TraceError(
                f"{min(self._forgotten)} is in a checkpoint, and runs again in the backward pass, where nothing is "
                "changed after this block or in another thread, as on a GPU; call backward() in the block, or switch "
                "the model's checkpoints off; torch.no_grad() where no gradient is asked for"
            )


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _checkpoint(module: Module) -> tuple[bool, bool]:
    """Whether a function of torch.utils.checkpoint is what calls a module, and whether by no other module."""
    frame: FrameType | None = sys._getframe()
    is_whole = True
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True, is_whole
        caller = frame.f_locals.get("self")
        is_whole &= caller is module or not isinstance(caller, torch.nn.Module)
        frame = frame.f_back
    return False, False
