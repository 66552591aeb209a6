from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--op", default="", help="only the cases of this op, e.g. rms_norm")
