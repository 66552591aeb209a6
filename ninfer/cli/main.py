"""ninfer: generate, or one of the other commands under the same name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ninfer.cli.output import run

COMMANDS = ("serve", "perplexity", "inspect", "calibrate", "convert")  # modules beside this one


def main(argv: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else list(argv)
    name = args.pop(0) if args and args[0] in COMMANDS else None
    module = import_module(f"ninfer.cli.{name or 'generate'}")  # the others' imports would take a third of a second
    return run(f"ninfer {name}" if name else "ninfer", module.body, args)


if __name__ == "__main__":
    sys.exit(main())
