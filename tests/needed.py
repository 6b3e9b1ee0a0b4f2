"""Packages that some tests need: on a user's machine what lacks is skipped, with its name; on CI it fails."""

import importlib
import os
from types import ModuleType

import pytest


def needed(name: str) -> ModuleType:
    """The module of that name."""
    return importlib.import_module(name) if os.environ.get("CI") else pytest.importorskip(name)
