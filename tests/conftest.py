from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import ranks


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.close_pools()
