"""A worker process of the sweep: reads a class a line from standard input, writes its row a line to standard output."""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers.utils import logging

from lrpx.coverage.checking import check
from lrpx.coverage.classes import ModelClass


def main() -> None:
    """Check classes until there are no more."""
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what models print shall not get between the rows
    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    for line in sys.stdin:
        row = check(ModelClass(**json.loads(line)))
        print(json.dumps(row.to_dict()), file=rows, flush=True)


if __name__ == "__main__":
    main()
