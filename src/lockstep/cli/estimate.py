"""``lockstep estimate``: what training a model takes, before it is run; nothing is loaded, downloaded or computed."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.estimate.estimate import ModelEstimate

DTYPES = ("fp32", "bf16", "fp16", "int8", "int4", "mixed-bf16", "mixed-fp16")
"""How numbers can be held; the names of `lockstep.estimate.estimate.PRECISIONS`, which needs torch."""
DEFAULT_DTYPES = ("fp32", "bf16", "fp16", "int8")
_LONG = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_SHAPE = re.compile(r"(?P<sizes>\d+(?:x\d+)*)?(?::(?P<dtype>\w+))?")

NOTE = (
    "Peak: the most that lives at one time in a training step after the first, on one process. On top come what "
    "kernels need inside one operation, Python and its libraries, and with several processes DDP's buckets, as "
    "large as the gradients."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a function that makes the model, as pkg.module:factory, or a folder with config.json and safetensors",
    )
    parser.add_argument(
        "--batch-size", "--batch_size", type=int, nargs="+", default=[1, 8, 32], metavar="N", dest="batch_sizes",
        help="samples in a batch (1 8 32)",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", type=lambda word: _LONG.get(word, word), choices=DTYPES, default=list(DEFAULT_DTYPES),
        metavar="TYPE", help=f"how numbers are held: {', '.join(DTYPES)} (default: {' '.join(DEFAULT_DTYPES)}); "
        "mixed-*: weights in fp32 and autocast; int*: weights only, no training",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME",
        help="adam, adamw, sgd, momentum, rmsprop, ..., or pkg.module:function from parameters to an optimizer (adamw)",
    )  # fmt: skip
    parser.add_argument(
        "--shape", action="append", default=[], metavar="SHAPE",
        help="what one sample is: 3x224x224, or 128:int64 for 128 tokens; once for each argument of the model",
    )  # fmt: skip
    parser.add_argument(
        "--batch", metavar="PATH", help="pkg.module:function from a batch size to a batch, instead of --shape"
    )
    parser.add_argument(
        "--loss",
        metavar="PATH",
        help="pkg.module:function of the model and a batch (default: the output's loss, or sum)",
    )
    parser.add_argument(
        "--sequence-length", "--sequence_length", type=int, metavar="N",
        help="tokens in a sample, for a folder's model (512, or as many as it takes)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes, instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Work it out and print it."""
    problems = list(_problems(arguments))
    if problems:
        raise ConfigError.of(problems)
    from rich.console import Console

    # A table needs its width; where no one looks at it, the terminal's says nothing.
    console = Console(width=None if sys.stdout.isatty() else 120)
    report = _work_out(arguments)
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, console)
    return 0


def _problems(arguments: argparse.Namespace) -> Iterator[str]:
    for size in arguments.batch_sizes:
        if size < 1:
            yield f"--batch-size is {size}, and must be at least 1."
    if arguments.sequence_length is not None and arguments.sequence_length < 1:
        yield f"--sequence-length is {arguments.sequence_length}, and must be at least 1."
    if arguments.shape and arguments.batch:
        yield "--shape and --batch both say what a batch is. Give one of them."
    for shape in arguments.shape:
        if not shape or not _SHAPE.fullmatch(shape):
            yield f"--shape {shape!r} is not a shape. Write the sizes of one sample, such as 3x224x224 or 128:int64."


def _work_out(arguments: argparse.Namespace) -> ModelEstimate:
    from contextlib import ExitStack

    from rich.console import Console

    errors = Console(stderr=True)
    with ExitStack() as stack:
        # Building a large model, even without data, takes a while.
        status = stack.enter_context(errors.status("loading torch")) if errors.is_terminal else None
        progress: Callable[[str], object] = (lambda text: status.update(text)) if status else (lambda text: None)
        from lockstep.estimate import find_model
        from lockstep.estimate.estimate import estimate

        progress(f"building {arguments.model}")
        found = find_model.find(arguments.model, sequence=arguments.sequence_length)
        named = arguments.optimizer
        return estimate(
            found,
            dtypes=list(dict.fromkeys(arguments.dtypes)),
            batch_sizes=list(dict.fromkeys(arguments.batch_sizes)),
            optimizer=find_model.resolve(named) if ":" in named else named,
            batch=_batch(arguments),
            loss=find_model.resolve(arguments.loss) if arguments.loss else None,
            progress=progress,
        )


def _batch(arguments: argparse.Namespace) -> Callable[[int], Any] | None:
    """What makes a batch, where the caller says it."""
    from lockstep.estimate import find_model

    if arguments.batch:
        found: Callable[[int], Any] = find_model.resolve(arguments.batch)
        return found
    if not arguments.shape:
        return None
    import torch

    samples = []
    for text in arguments.shape:
        parts = _SHAPE.fullmatch(text)
        assert parts is not None
        dtype = getattr(torch, parts["dtype"] or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"--shape {text!r}: torch has no type {parts['dtype']!r}. Write one such as int64.")
        samples.append(([int(size) for size in parts["sizes"].split("x")] if parts["sizes"] else [], dtype))
    return lambda size: tuple(torch.zeros(size, *shape, dtype=dtype) for shape, dtype in samples)


# ---------------------------------------------------------------- for people


def show(report: ModelEstimate, console: Console) -> None:
    """Two tables: what the model takes by itself, and what each batch size takes."""
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *headings: str) -> Table:
        made = Table(title=Text(title), title_justify="left")
        for number, heading in enumerate(headings):
            made.add_column(heading, justify="right" if number else "left", no_wrap=True)
        return made

    console.print(Text(f"{report.model}: {report.parameters:,} weights to train"))
    optimizer = f"optimizer ({report.optimizer})"
    sizes = table("The model", "type", "largest layer", "total size", "gradients", optimizer, "training with Adam")
    for row in report.sizes:
        parts = (row.largest_layer, row.weights, row.gradients, row.optimizer, row.training_with_adam)
        sizes.add_row(row.dtype, *map(_words, parts))
    console.print(sizes)
    if report.sizes and report.sizes[0].largest_layer_name:
        console.print(Text(f"The largest layer is {report.sizes[0].largest_layer_name}."))
    if report.forecasts:
        forecasts = table("With a batch", "type", "batch size", "batch", "activations", "peak", "peak in")
        for one in report.forecasts:
            figures = (one.batch, one.activations, one.peak)
            forecasts.add_row(one.dtype, str(one.batch_size), *map(_words, figures), one.peak_in)
        console.print(forecasts)
        console.print(Text(NOTE))
    for note in report.notes:
        console.print(Text(note))


def _words(size: int | None) -> str:
    if size is None:
        return "-"
    from lockstep.config.sizes import in_words

    return in_words(size)
