"""python -m ninfer: the same as ninfer."""

from __future__ import annotations

import sys

from ninfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
