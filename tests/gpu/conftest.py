"""Tests here stand on the helpers and the laws of tests.core."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture
def two_gpus() -> None:
    """For tests whose ranks have a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
