# SPDX-License-Identifier: Apache-2.0
"""Who saves together: from torch.distributed and a mesh to :class:`lastgood.parts.Ranks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lastgood.errors import InvalidError
from lastgood.parts import Axis, Ranks

if TYPE_CHECKING:
    from lastgood.comm import Communicator
    from lastgood.pytorch import StoreKeys

# What the names of data-parallel axes begin with.
_DATA = ("dp", "ddp", "fsdp", "hsdp", "replicate", "shard", "data")


def communicator(given: Communicator | None, timeout: float, ends: contextlib.ExitStack) -> Communicator | None:
    """The ranks that save together; None: this process alone. *Collective* where a group is made.

    Args:
        given: the caller's; None: all of torch.distributed.
        timeout: the longest wait that a session will make, seconds.
        ends: closes what is made here.

    Raises:
        InvalidError: this is one of several processes that do not know of each other.
    """
    if given is not None:
        return given
    if not dist.is_available() or not dist.is_initialized():
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched not in ("", "1"):
            raise InvalidError(
                f"WORLD_SIZE is {launched}, but torch.distributed is not initialised: each process would take the root "
                "from the others; call torch.distributed.init_process_group() before, or give comm="
            )
        return None
    if dist.get_world_size() == 1:
        return None
    from lastgood.pytorch import GlooCommunicator

    made = GlooCommunicator(timeout=max(3600.0, 2 * timeout))
    ends.callback(_close, made)
    return made


def _close(made: Any) -> None:
    # The program may have ended torch.distributed as a whole before.
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            made.close()


def store_keys(comm: Communicator | None) -> StoreKeys | None:
    """The store of torch.distributed; one process needs none."""
    if comm is None:
        return None
    from lastgood.pytorch import StoreKeys

    return StoreKeys()


def ranks_of(comm: Communicator | None, mesh: Any, data_axes: Sequence[str] | None) -> Ranks:
    """Ranks and axes.

    Args:
        mesh: a DeviceMesh; None: all ranks are data-parallel.
        data_axes: names of axes along which ranks take different samples; None: by their names.
    """
    rank, world = (0, 1) if comm is None else (comm.rank, comm.size)
    if mesh is None:
        if data_axes is not None:
            raise InvalidError("data_axes names axes of a mesh: give mesh= too")
        return Ranks(rank, world, (Axis("dp", world, rank),), ("dp",), comm)
    if isinstance(data_axes, str):
        raise InvalidError(f"data_axes is the string {data_axes!r}; give a list of names")
    if not hasattr(mesh, "mesh_dim_names"):
        raise InvalidError(f"mesh is {mesh!r}, not a DeviceMesh")
    names = mesh.mesh_dim_names
    if not names:
        raise InvalidError('the axes of the mesh have no names: init_device_mesh(..., mesh_dim_names=("dp", "tp"))')
    place = mesh.get_coordinate()
    if place is None or mesh.size() != world:
        raise InvalidError(
            f"the mesh {tuple(names)} has {mesh.size()} ranks, the run {world}: give the mesh over all ranks, "
            "not a part of it"
        )
    axes = tuple(Axis(str(name), int(mesh.size(i)), int(place[i])) for i, name in enumerate(names))
    unknown = set(data_axes or ()) - set(names)
    if unknown:
        raise InvalidError(f"data_axes has {sorted(unknown)}, but the axes of the mesh are {list(names)}")
    data = tuple(n for n in names if n in data_axes) if data_axes is not None else _by_name(names)
    return Ranks(rank, world, axes, data, comm)


def _by_name(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.lower().startswith(_DATA))
