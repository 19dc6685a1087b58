"""Engine arguments as words of a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3x.types import EagleError


def flags(arguments: Mapping[str, Any], off: str | None) -> list[str]:
    """`max_num_seqs` 8 is `--max-num-seqs 8`, True is the option alone; None leaves an option out.

    off: what False has before the option's name ("--no-"); None: the option is left out.
    """
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case None:
                pass
            case True:
                words.append(f"--{option}")
            case False:
                words += [] if off is None else [f"{off}{option}"]
            case Mapping():
                words += [f"--{option}", json.dumps(dict(value))]
            case str() | int() | float():
                words += [f"--{option}", str(value)]
            case Sequence():
                words += [f"--{option}", *map(str, value)]
            case _:
                raise EagleError(f"backend.engine_args.{name}: {value!r} cannot be written on a command line")
    return words
