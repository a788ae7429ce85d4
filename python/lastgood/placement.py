# SPDX-License-Identifier: Apache-2.0
"""Placements of torch's DTensors as layouts."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from lastgood import dtypes
from lastgood.errors import UnsupportedError
from lastgood.layout import Layout, Split

# Axes of a mesh whose ranks hold different modules.
_STAGES = ("pp", "pipe", "stage")
_placed: dict[Any, Placed] = {}


def is_dtensor(value: Any) -> bool:
    """Whether it is a DTensor."""
    module = dtypes.imported("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(t: Any) -> torch.Tensor:
    """The memory of this rank's part."""
    found: torch.Tensor = t._local_tensor  # what to_local() gives, without autograd around it
    return found


def holds(t: Any) -> bool:
    """Whether this rank is in the DTensor's mesh."""
    return t.device_mesh.get_coordinate() is not None


def splits_of(name: str, sizes: tuple[int, ...], placements: tuple[Any, ...], shard_order: Any = None) -> list[Split]:
    """The cuts that placements mean.

    torch applies placements from left to right, each to what the ones before have left. A ``_StridedShard`` of factor f
    cuts that into f pieces first and takes its share of each: with f the number of pieces that axes to its right make,
    this is the same as cutting by those axes first, which is what FSDP over tensor parallelism does.

    Args:
        name: for messages.
        sizes: of the mesh's axes.
        placements: one an axis.
        shard_order: torch's order of axes by tensor dimension where it is not from left to right.

    Raises:
        UnsupportedError: partial sums, or placements whose parts no layout describes.
    """
    by_dim: dict[int, list[tuple[int, int]]] = {}  # dim -> axis and factor, from left to right
    for axis, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "_StridedShard":
            by_dim.setdefault(placement.dim, []).append((axis, int(placement.split_factor)))
        elif kind == "Shard":
            by_dim.setdefault(placement.dim, []).append((axis, 1))
        elif "Partial" in kind:
            raise UnsupportedError(
                f'"{name}": its placement {placement} is a partial sum, which no rank holds; redistribute it to '
                "Replicate or Shard before it is saved"
            )
        elif kind != "Replicate":
            raise UnsupportedError(f'"{name}": placement {placement} is not known; use Shard or Replicate')
    if shard_order:
        return [Split(entry.tensor_dim, axis) for entry in shard_order for axis in entry.mesh_dims]
    found: list[Split] = []
    for dim, cuts in sorted(by_dim.items()):
        order = _order(sizes, cuts)
        if order is not None:
            found += [Split(dim, axis) for axis in order]
            continue
        *before, (axis, factor) = cuts
        if any(f != 1 for _, f in before):
            raise UnsupportedError(
                f'"{name}": placements {list(placements)} cut dimension {dim} in a way that no layout has; redistribute it'
            )
        found += [Split(dim, a) for a, _ in before]
        found += [Split(dim, None, pieces=factor), Split(dim, axis)]
    return found


def _order(sizes: tuple[int, ...], cuts: list[tuple[int, int]]) -> list[int] | None:
    """The axes in the order in which they cut, coarsest first; None if the factors mean no order."""
    order: list[int] = []
    for axis, factor in reversed(cuts):  # the factor counts pieces of axes to its right
        for at in range(len(order) + 1):
            if math.prod(sizes[a] for a in order[:at]) == factor:
                order.insert(at, axis)
                break
        else:
            return None
    return order


def _root_of(mesh: Any) -> Any:
    """The mesh that a mesh was sliced from, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # torch before 2.9

    resources = getattr(device_mesh, "_mesh_resources", None)
    return mesh if resources is None else resources.get_root_mesh(mesh)


def _holders(mesh: Any) -> tuple[tuple[int, ...], list[int], str]:
    """Axes of the root mesh along which slices like this one hold the same: their sizes, the ranks over these and the
    mesh's own, row-major, and this rank's place in its slice. Stages of a pipeline hold different things.
    """
    own = mesh.mesh
    root = _root_of(mesh)
    names = root.mesh_dim_names
    if root.mesh.numel() == own.numel() or names is None:
        return (), own.flatten().tolist(), ""
    places = {int(root.mesh[c]): c for c in itertools.product(*(range(n) for n in root.mesh.shape))}
    ranks = own.flatten().tolist()
    mine = [places[r] for r in ranks]
    others = [
        axis
        for axis, size in enumerate(root.mesh.shape)
        if size > 1 and len({c[axis] for c in mine}) == 1 and not names[axis].startswith(_STAGES)
    ]
    found = []
    for combination in itertools.product(*(range(root.mesh.shape[axis]) for axis in others)):
        for place in mine:
            other = list(place)
            for axis, index in zip(others, combination, strict=True):
                other[axis] = index
            found.append(int(root.mesh[tuple(other)]))
    coordinate = ".".join(str(i) for i in mesh.get_coordinate() or ())
    where = f"{'.'.join(names[a] for a in range(len(names)) if a not in others)}.{coordinate}"
    return tuple(root.mesh.shape[axis] for axis in others), found, where if others else ""


class Placed(NamedTuple):
    """Where a DTensor is."""

    layout: Layout
    slices: str  # not empty: slices of a larger mesh hold the same; this rank's place in its slice


def placed(name: str, t: Any) -> Placed:
    """The layout of a DTensor, over global ranks; the same object for all that are placed alike.

    A DTensor on a slice of a mesh (FSDP over the data axis of a mesh that has another for tensor parallelism, of a
    parameter that is not cut by it) is there on each such slice.
    """
    spec = t._spec
    order = getattr(spec, "shard_order", None)
    if getattr(spec, "use_strided_shard_as_shard_order", False):
        order = None  # the placements say it
    key = (spec.mesh, spec.placements, order)
    found = _placed.get(key)
    if found is None:
        sizes = tuple(spec.mesh.mesh.shape)
        splits = splits_of(name, sizes, spec.placements, order)
        more, ranks, where = _holders(spec.mesh)
        splits = [s if s.axis is None else s._replace(axis=s.axis + len(more)) for s in splits]
        found = Placed(Layout((*more, *sizes), splits, ranks=ranks), where)
        if len(_placed) >= 4096:
            _placed.clear()
        _placed[key] = found
    return found


def layout_of(name: str, t: Any) -> Layout:
    """The layout of a DTensor."""
    return placed(name, t).layout


def text_of(t: Any) -> str:
    """Mesh and placements in words: equal where the same ranks hold the same parts."""
    ranks = t.device_mesh.mesh
    return f"{[str(p) for p in t.placements]} over ranks {ranks.tolist()}"


def replicated(like: Any, part: torch.Tensor) -> Any:
    """A DTensor of which every rank of the mesh of ``like`` holds all, ``part``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim, run_check=False)
