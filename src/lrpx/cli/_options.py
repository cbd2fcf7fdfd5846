"""What commands share: their class, and options of several."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption


class Command(TyperCommand):
    """A command that refuses an option which takes one value and is given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What is left of the arguments, as typer has it."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for each in dict.fromkeys(given):
            is_single = (
                isinstance(each, TyperOption) and not each.multiple and not (each.is_flag and not each.secondary_opts)
            )
            if is_single and given.count(each) > 1:
                ctx.fail(f"{each.opts[0]} is given twice, and takes one value; give it once")
        return super().parse_args(ctx, args)


Model = Annotated[
    str | None, typer.Option(help="Name or folder of a Hugging Face model.", show_default="the bundled model")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ….", show_default="where the model loads")]
Precision = Annotated[str, typer.Option(help="float32, float64, bfloat16, float16; auto is the checkpoint's own.")]
