# SPDX-License-Identifier: Apache-2.0
"""NumPy's basic indexing as regions of a tensor: what to read, and what to do
with it afterwards.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from lastgood.arrays import RawArray


class Region(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]  # elements
    extent: tuple[int, ...]  # elements
    kept: tuple[int, ...]  # dimensions that no integer took away
    steps: tuple[slice, ...] | None  # to be applied to an array of `shape`

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent in the dimensions that are kept."""
        return tuple(self.extent[d] for d in self.kept)

    def widened(self, strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Strides of memory of that shape, for memory of the extent."""
        if strides is None:
            return None
        wide = [0] * len(self.extent)
        for dim, stride in zip(self.kept, strides, strict=True):
            wide[dim] = stride
        return tuple(wide)

    def applied(self, array: Any) -> Any:
        """What the index means, of an array that holds the extent."""
        if isinstance(array, RawArray):
            return RawArray(array.dtype, self.shape, array.data)
        if len(self.kept) != len(self.extent):
            # By the array's own shape: torch's F4 has half as many elements in the last dimension.
            array = array.reshape(tuple(array.shape[d] for d in self.kept))
        return array if self.steps is None else array[self.steps]


def normalised(index: Any, shape: tuple[int, ...]) -> Region:
    """The region that an index means: integers, slices and an ellipsis. A step reads the range between its first and
    last element.

    Raises:
        IndexError: an integer is out of range, or there are too many indices.
        TypeError: something else than those three.
    """
    items = index if isinstance(index, tuple) else (index,)
    ellipses = sum(item is Ellipsis for item in items)
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = len(items) - ellipses
    if given > len(shape):
        raise IndexError(f"too many indices: {given} for a tensor of {len(shape)} dimensions")
    rest = (slice(None),) * (len(shape) - given)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items = (*items[:at], *rest, *items[at + ellipses :])
    offset, extent, kept, steps = [], [], [], []
    for dim, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            count = len(range(start, stop, step))
            first, last = (start, start + (count - 1) * step) if count else (0, -1)
            offset.append(min(first, last) if count else 0)
            extent.append(abs(last - first) + 1 if count else 0)
            kept.append(dim)
            steps.append(slice(None, None, step if count else 1))
            continue
        if item is None or isinstance(item, bool) or not hasattr(type(item), "__index__"):
            raise TypeError(f"a stored tensor takes integers, slices and '...', not {item!r}; load it and index that")
        i = operator.index(item)
        if not -size <= i < size:
            raise IndexError(f"index {i} is out of bounds for dimension {dim} with size {size}")
        offset.append(i % size)
        extent.append(1)
    simple = all(s.step == 1 for s in steps)
    return Region(tuple(offset), tuple(extent), tuple(kept), None if simple else tuple(steps))
