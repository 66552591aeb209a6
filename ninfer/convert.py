"""python -m ninfer.convert: the same as ninfer-convert."""

from __future__ import annotations

import sys

from ninfer.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
