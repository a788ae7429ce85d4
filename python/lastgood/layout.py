# SPDX-License-Identifier: Apache-2.0
"""How a tensor is cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from lastgood._core import ffi, lib
from lastgood.errors import call, invalid


class Split(NamedTuple):
    """One cut of a tensor's dimension.

    Args:
        dim: dimension of the tensor.
        axis: mesh axis over whose ranks the pieces go, or None: all pieces stay on the same rank, as for a fused
            query-key-value matrix of which each third is cut again.
        pieces: how many, with ``axis=None``; else ignored.
        mode: ``"ceil"``: pieces of ceil(n/p), the last ones shorter or empty (torch.chunk, FSDP2, DTensor);
            ``"even"``: sizes differ by at most one, longer ones first (torch.tensor_split).
    """

    dim: int
    axis: int | None = 0
    pieces: int = 0
    mode: Literal["ceil", "even"] = "ceil"


class Layout:
    """Which rank holds which part of a tensor; shared by all tensors that are cut alike. Axes of the mesh that no split
    uses are replica axes: the ranks along them hold the same bytes.

    Args:
        mesh: sizes of the mesh's axes, ``(2, 4)`` for 8 ranks.
        splits: cuts, applied in order.
        ranks: the ranks of the mesh, row-major; None: ``origin`` plus coordinates times ``strides``.
        strides: ranks between neighbours along each axis; None: row-major.
        origin: the first rank.
        writers: how many of the holders of a replica write a piece each; 0: so many that each writes 32 MiB or more.

    Example: rows over 4 ranks, as FSDP2 does::

        Layout([4], [Split(dim=0, axis=0)])
    """

    flat = False

    def __init__(
        self,
        mesh: Sequence[int],
        splits: Sequence[Split] = (),
        *,
        ranks: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        origin: int = 0,
        writers: int = 0,
    ) -> None:
        self._create(mesh, splits, ranks, strides, origin, writers, 0, 0)

    @classmethod
    def flat_buffer(
        cls,
        length: int,
        mesh: Sequence[int],
        *,
        axis: int = 0,
        ranks: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        origin: int = 0,
        writers: int = 0,
    ) -> Layout:
        """A one-dimensional buffer of ``length`` elements, cut into ceil-pieces over a mesh axis, in which tensors lie
        one after another (ZeRO). Tensors give their place in it as ``flat_offset``.
        """
        layout = cls.__new__(cls)
        layout._create(mesh, (), ranks, strides, origin, writers, length, axis)
        layout.flat = True
        return layout

    def _create(
        self,
        mesh: Sequence[int],
        splits: Sequence[Split],
        ranks: Sequence[int] | None,
        strides: Sequence[int] | None,
        origin: int,
        writers: int,
        flat_length: int,
        flat_axis: int,
    ) -> None:
        if ranks is not None:
            count = 1
            for size in mesh:
                count *= size
            if len(ranks) != count:
                invalid(f"a mesh of {list(mesh)} has {count} ranks, {len(ranks)} were given")
        if strides is not None and len(strides) != len(mesh):
            invalid(f"a mesh of {len(mesh)} axes has as many strides, {len(strides)} were given")
        desc = ffi.new("lg_layout_desc *")
        sizes = ffi.new("uint32_t[]", list(mesh))
        numbers = ffi.NULL if ranks is None else ffi.new("uint32_t[]", list(ranks))
        steps = ffi.NULL if strides is None else ffi.new("uint32_t[]", list(strides))
        cuts = ffi.new("lg_split[]", len(splits))
        for cut, split in zip(cuts, splits, strict=True):
            cut.dim = split.dim
            cut.axis = lib.LG_NO_AXIS if split.axis is None else split.axis
            cut.pieces = split.pieces
            if split.mode not in ("ceil", "even"):
                invalid(f'mode of a split is {split.mode!r}, not "ceil" or "even"')
            cut.mode = lib.LG_SPLIT_CEIL if split.mode == "ceil" else lib.LG_SPLIT_EVEN
        desc.size = ffi.sizeof("lg_layout_desc")
        desc.mesh_ndim, desc.mesh_sizes, desc.mesh_strides = len(mesh), sizes, steps
        desc.mesh_origin, desc.ranks = origin, numbers
        desc.n_splits, desc.splits = len(splits), cuts
        desc.flat_length, desc.flat_axis, desc.writers = flat_length, flat_axis, writers
        out = ffi.new("lg_layout **")
        call(lib.lg_layout_create, desc, out)
        self._ptr = ffi.gc(out[0], lib.lg_layout_free)
        self.address = int(ffi.cast("uintptr_t", out[0]))

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part that a rank holds of a tensor of the given global shape; for flat layouts use
        :meth:`local_range`.
        """
        if self.flat:
            invalid("a flat layout gives ranges, not shapes: use local_range")
        local = ffi.new("uint64_t[]", len(shape) + 1)
        call(lib.lg_layout_local, self._ptr, rank, len(shape), self._dims(shape), 0, local, ffi.NULL, ffi.NULL)
        return tuple(local[0 : len(shape)])

    def local_range(self, rank: int, shape: Sequence[int], flat_offset: int) -> tuple[int, int]:
        """For flat layouts: where the rank's range in the tensor begins, row-major, and its length, in elements."""
        if not self.flat:
            invalid("only a flat layout gives ranges: use local_shape and offset")
        start, elements = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        dims = self._dims(shape)
        call(lib.lg_layout_local, self._ptr, rank, len(shape), dims, flat_offset, ffi.NULL, start, elements)
        return int(start[0]), int(elements[0])

    def offset(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Global index of the rank's first element, for layouts whose parts are one box."""
        offset = ffi.new("uint64_t[]", len(shape) + 1)
        call(lib.lg_layout_offset, self._ptr, rank, len(shape), self._dims(shape), offset)
        return tuple(offset[0 : len(shape)])

    @staticmethod
    def _dims(shape: Sequence[int]) -> Any:
        return ffi.new("uint64_t[]", [*shape, 0])
