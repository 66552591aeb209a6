"""ninfer: generate, or one of the other commands under the same name."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ninfer.cli import calibrate, convert, generate, inspect, perplexity, serve
from ninfer.cli.output import run

COMMANDS = {
    "serve": serve.body,
    "perplexity": perplexity.body,
    "inspect": inspect.body,
    "calibrate": calibrate.body,
    "convert": convert.body,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else list(argv)
    if args and args[0] in COMMANDS:
        return run(f"ninfer {args[0]}", COMMANDS[args[0]], args[1:])
    return run("ninfer", generate.body, args)


if __name__ == "__main__":
    sys.exit(main())
