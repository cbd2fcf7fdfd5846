"""``lrpx benchmark``: a command for each benchmark, and for a script that registers one.

What a benchmark of ours takes is read from its source, not imported, so that help and completion are quick.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import shlex
import sys
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer
from typer.core import TyperCommand, TyperGroup

import lrpx
from lrpx.cli._options import Command, Device, Model, Precision
from lrpx.cli._streams import hush, progress, refuse_folder, refuse_unreadable
from lrpx.cli._wanted import methods as known_methods
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OURS: Final = {
    "sva": ("_agreement.py",),
    "circuits": ("_circuits.py", "_pairs.py"),
    "faithfulness": ("_faithfulness.py",),
    "loo": ("_faithfulness.py",),
    "layers": ("_layers.py", "_faithfulness.py"),
    "patching": ("_patching.py", "_pairs.py"),
    "pixels": ("_pixels.py",),
    "mosaics": ("_pixels.py",),
    "positions": ("_position_tests.py", "_faithfulness.py"),
    "qa": ("_qa.py",),
    "qa-perturbed": ("_qa.py",),
}
"""Our benchmarks, and the files of ``lrpx.benchmarks`` that define them, and what they derive from."""


@dataclass(frozen=True)
class Face:
    """What the command line needs of a benchmark to offer it.

    Args:
        name: as it is found by.
        help: its first paragraph.
        options: the type of each field, and what is said of it.
        defaults: of the fields that have one.
    """

    name: str
    help: str
    options: Mapping[str, tuple[Any, str]]
    defaults: Mapping[str, Any]


class _Benchmarks(TyperGroup):
    """A command for each benchmark."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The names of all that are registered."""
        others = (entry.name for entry in metadata.entry_points(group="lrpx.benchmarks"))
        loaded = sys.modules.get("lrpx.benchmarks")  # what a program has registered that calls this as a function
        return list(dict.fromkeys([*OURS, *others, *(loaded.BENCHMARKS if loaded else ())]))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """The command of a benchmark, by its name or its script."""
        if cmd_name not in OURS and cmd_name in self.list_commands(ctx) and "lrpx.benchmarks" not in sys.modules:
            return _Later(cmd_name)
        return _built(_face(cmd_name))


class _Later(TyperCommand):
    """Another package's benchmark in a list of them; it is imported when it is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help="A benchmark of another package.")

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """That of the real command."""
        assert self.name is not None
        return _built(_face(self.name)).make_context(info_name, args, parent, **extra)


benchmark = typer.Typer(
    cls=_Benchmarks,
    help="Measure how well the methods find what matters: a benchmark by its name, or a script that registers one.",
    no_args_is_help=True,
)


@cache
def _face(name: str) -> Face:
    """What is offered of a benchmark.

    Raises:
        LRPxError: there is no such benchmark, or its script cannot be run.
    """
    if name in OURS:
        return read_face(name, *(Path(lrpx.__file__).parent / "benchmarks" / file for file in OURS[name]))
    from lrpx.benchmarks import find

    kind = find(name)
    defaults = {each.name: each.default for each in fields(kind) if each.default is not MISSING}  # type: ignore[arg-type]
    return Face(name, inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0], kind.options(), defaults)


def read_face(name: str, *sources: Path) -> Face:
    """The same, read from the source of a benchmark: of the class of that name, its fields ``Annotated[type, "…"]``,
    and those of the class of these files that it derives from."""
    known = vars(builtins) | {"Annotated": Annotated, "Path": Path}
    trees = (ast.parse(source.read_text(encoding="utf-8")) for source in sources)
    classes = {each.name: each for tree in trees for each in tree.body if isinstance(each, ast.ClassDef)}
    (kind,) = (each for each in classes.values() if _is_named(each, name))
    bases = [classes[each.id] for each in kind.bases if isinstance(each, ast.Name) and each.id in classes]
    options, defaults = {}, {}
    for each in [*(line for base in bases for line in base.body), *kind.body]:
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.annotation).startswith("Annotated["):
            field = ast.unparse(each.target)
            wanted, said = get_args(eval(ast.unparse(each.annotation), known))
            options[field] = wanted, said
            if each.value is not None:
                defaults[field] = ast.literal_eval(each.value)
    return Face(name, (ast.get_docstring(kind) or "").split("\n\n")[0], options, defaults)


def _is_named(kind: ast.ClassDef, name: str) -> bool:
    named = (each for each in kind.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "name")
    return any(isinstance(each.value, ast.Constant) and each.value.value == name for each in named)


def _built(face: Face) -> Any:
    single = typer.Typer(add_completion=False)
    single.command(face.name, cls=Command, help=face.help)(_command(face))
    return typer.main.get_command(single)


def _command(face: Face) -> Callable[..., None]:
    """A benchmark's command: its fields are options, beside those that every benchmark has."""
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=face.defaults.get(name, inspect.Parameter.empty),
            annotation=Annotated[wanted, typer.Option(*_flag(name, wanted, face.defaults.get(name)), help=said)],
        )
        for name, (wanted, said) in face.options.items()
    ]

    def run(**given: Any) -> None:
        _benchmark(face.name, {name: given.pop(name) for name in face.options}, **given)

    common = inspect.signature(_benchmark, eval_str=True).parameters.values()
    parameters += [each for each in common if each.kind is inspect.Parameter.KEYWORD_ONLY]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _flag(name: str, wanted: Any, default: Any) -> list[str]:
    """What turns a field on that is off by default: there is nothing to turn off."""
    return ["--" + name.replace("_", "-")] if wanted is bool and default is False else []


def _benchmark(
    name: str,
    options: dict[str, Any],
    *,
    out: Annotated[Path, typer.Option(help="Keep everything in this folder; started again, the run goes on there.")],
    model: Model = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Some of: {', '.join(known_methods())}; or a recipe (my.json), or a script (my.py); commas between.",
            show_default="those of the benchmark",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Some of its metrics, or a script (my.py); commas between.", show_default="those of the benchmark"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="The most samples run together.")] = 32,
    part: Annotated[int, typer.Option(min=1, help="Samples in a part: a stopped run loses the part in work.")] = 512,
    dtype: Precision = "auto",
    device: Device = None,
    show: Annotated[list[str] | None, typer.Option(help="Show the heatmap of the sample with this id, too.")] = None,
) -> None:
    refuse_folder(out)
    for value in options.values():
        refuse_unreadable(*(each for each in (value if isinstance(value, list) else [value]) if _is_file(each)))
    from rich.console import Console
    from rich.progress import Progress

    from lrpx.benchmarks import Benchmark, Run, find, keep
    from lrpx.benchmarks._keeping import read_or_kept, refuse_other
    from lrpx.benchmarks._running import find_metric
    from lrpx.methods import find as find_method
    from lrpx.methods._contract import check_each_once
    from lrpx.model import Spec

    measured = find(name)(**options)
    measured.check()
    chosen = []
    for each in _listed(methods) or ():
        try:
            chosen.append(find_method(each))  # before a model is loaded
        except MethodError:
            if type(measured).of_model is Benchmark.of_model:
                raise  # else it may be one that the benchmark has for the model
    if chosen:
        check_each_once(chosen)
        measured.check_methods(chosen)
    judges = [find_metric(each, measured.metrics) for each in _listed(metrics) or measured.usual()]
    measured.columns([each.name for each in chosen], judges)
    spec = Spec(model, dtype, device)
    with progress("Reading the samples …"):  # before a model is loaded
        known = chosen if type(measured).of_model is Benchmark.of_model else []
        refuse_other(measured, out, spec, known, judges if metrics is not None else (), part=part)
        source = read_or_kept(measured, out)
    with progress("Loading the model …"):
        hush()
        bound = spec.build()
    run = Run(measured, bound, _listed(methods), _listed(metrics), batch_size=batch_size, part=part)
    run.source = source
    with contextlib.ExitStack() as stack:
        with progress("Reading the texts as the model does …"):
            kept = stack.enter_context(keep(run, out, shlex.join(["lrpx", *sys.argv[1:]])))
        kept.check_shown(show or ())
        for told, value in kept.numbers.items():
            print(f"{told}: {value:,.6g}")
        console = Console(stderr=True)
        with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("Explaining", total=len(run))
            kept.explain(lambda more: bar.advance(task, more))
        with progress("Writing the reports …"):
            found = measured.report(kept.store, show or ())
    Console().print(found)
    print(*sorted(path for path in out.iterdir() if not path.name.startswith(".")), sep="\n")


def _listed(names: str | None) -> list[str] | None:
    """Names with commas between."""
    return None if names is None else [name.strip() for name in names.split(",")]


def _is_file(value: Any) -> bool:
    """Whether an option names a file to be read; a folder is a benchmark's own matter."""
    return isinstance(value, Path) and not value.is_dir()
