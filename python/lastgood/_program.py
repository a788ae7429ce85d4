# SPDX-License-Identifier: Apache-2.0
"""The command line program, which is the C program."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Becomes it."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bin", "lastgood")
    os.execv(program, ["lastgood", *sys.argv[1:]])
