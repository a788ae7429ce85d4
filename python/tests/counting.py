# SPDX-License-Identifier: Apache-2.0
"""What something costs, in calls: the same on every machine, however busy. Times are bench/python_costs.py's."""

import sys


def calls(work):
    """How many functions, of Python and of C, `work` calls in this thread."""
    n = 0

    def count(_frame, event, _arg):
        nonlocal n
        n += event in ("call", "c_call")

    work()  # what comes once comes here
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n
