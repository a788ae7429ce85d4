# SPDX-License-Identifier: Apache-2.0
"""What need not be installed: a test that touches it is skipped where it is not, and a file that needs it to be read at
all is skipped as a whole.
"""

import importlib
import importlib.util
import sys

import pytest

# Those of the tests' requirements that `tools/pythons` leaves out.
MISSING = [name for name in ("torch",) if importlib.util.find_spec(name) is None]


class Missing:
    """Stands for a module that is not installed."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith(("_", "pytest")):  # what pytest looks for in everything that a file has
            raise AttributeError(attribute)
        skip(self._name)


def skip(name):
    """Skips the test, or the file that is being read."""
    pytest.skip(f"needs {name}", allow_module_level=True)


def need(name):
    """For tests whose programs, in processes of their own, import it."""
    if name in MISSING:
        skip(name)


class Finder:
    """Asked for modules that nobody else finds, while files are read."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        need(name)


def begin_to_read():
    """Imports of what is missing skip the file."""
    if MISSING:
        sys.meta_path.append(Finder)


def end_of_reading():
    """From here on they fail as in a program."""
    if Finder in sys.meta_path:
        sys.meta_path.remove(Finder)


torch = Missing("torch") if "torch" in MISSING else importlib.import_module("torch")
