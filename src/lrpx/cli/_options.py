"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str | None, typer.Option(help="Name or folder of a Hugging Face model.", show_default="the bundled model")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ….", show_default="where the model loads")]
Precision = Annotated[str, typer.Option(help="float32, float64, bfloat16, float16; auto is the checkpoint's own.")]
