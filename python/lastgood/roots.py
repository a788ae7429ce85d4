# SPDX-License-Identifier: Apache-2.0
"""A root from outside: what it holds, and what is kept, removed, rolled back."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from lastgood._core import ffi, lib
from lastgood.checkpoint import Generation
from lastgood.errors import Status, call, status_of, text_of
from lastgood.handles import path_bytes

Path = str | os.PathLike[str]


class Entry(NamedTuple):
    """A name in a root. What does not apply is zero or empty."""

    kind: str  # "committed", "partial", "trash", "tombstone", "owner", "rollback", "foreign"
    name: str
    step: int
    generation: Generation
    status: Status  # committed: OK if manifest and files' sizes are right
    reason: str  # why it is not OK
    discarded: bool  # passed over by a rollback
    pinned: bool
    newest: bool  # the one that a resume tries first
    run_id: str
    created: str  # UTC, informative
    world: int  # ranks that saved it
    tensors: int
    nbytes: int  # of all files that the manifest lists
    target: tuple[int, Generation] | None  # rollback: step and generation it leads to
    note: str  # rollback: its reason; pinned: why; owner: who claimed


class Pruned(NamedTuple):
    """What :func:`prune` does with a checkpoint."""

    name: str
    step: int
    generation: Generation
    nbytes: int
    removed: bool  # or would be, in a dry run
    reason: str


class Swept(NamedTuple):
    """What :func:`sweep` removed, or would."""

    name: str
    nbytes: int


def _generation(g: Any) -> Generation:
    return Generation(int(g.epoch), int(g.serial))


def entries(root: Path, *, all: bool = False) -> list[Entry]:
    """What a root holds, without opening it for writing: checkpoints and rollbacks, newest first.

    Args:
        all: what is partial, trash, owners and foreign names too, behind the rest.
    """
    out = ffi.new("lg_listing **")
    call(lib.lg_list, path_bytes(root), lib.LG_LIST_ALL if all else 0, out)
    listing = ffi.gc(out[0], lib.lg_listing_free)
    found = []
    for i in range(listing.n):
        e = listing.entries[i]
        kind = text_of(lib.lg_entry_kind_name(e.kind))
        found.append(
            Entry(
                kind,
                text_of(e.name),
                int(e.step),
                _generation(e.generation),
                status_of(e.status),
                text_of(e.reason),
                bool(e.discarded),
                bool(e.pinned),
                bool(e.newest),
                text_of(e.run_id),
                text_of(e.created),
                int(e.world),
                int(e.tensors),
                int(e.bytes),
                (int(e.target_step), _generation(e.target)) if kind == "rollback" else None,
                text_of(e.note),
            )
        )
    return found


def pin(where: Path, reason: str = "") -> None:
    """Protects a checkpoint from retention and :func:`prune`."""
    call(lib.lg_pin, path_bytes(where), 1, ffi.new("char[]", reason.encode()))


def unpin(where: Path, reason: str = "") -> None:
    """Lifts the protection."""
    call(lib.lg_pin, path_bytes(where), 0, ffi.new("char[]", reason.encode()))


def prune(root: Path, *, keep_last: int, keep_every: int = 0, dry_run: bool = True) -> list[Pruned]:
    """Applies a rule of retention by hand, after verifying the newest checkpoint that stays in full.

    Args:
        keep_last: how many of the newest stay, at least 1.
        keep_every: and every K-th step; 0: none.
        dry_run: remove nothing, only say what would be.

    Returns:
        Every checkpoint, newest first.
    """
    options = ffi.new("lg_prune_options *")
    options.size = ffi.sizeof("lg_prune_options")
    options.keep_last, options.keep_every, options.dry_run = keep_last, keep_every, int(dry_run)
    found: list[Pruned] = []
    handle = ffi.new_handle(found)
    call(lib.lg_prune, path_bytes(root), options, lib.lgpy_pruned, handle)
    return found


def remove(where: Path, *, last: bool = False) -> None:
    """Removes one checkpoint: never a pinned one, and never the last good one.

    Args:
        last: even the last one: its contents are known to be wrong, however whole its files are.
    """
    call(lib.lg_remove_last if last else lib.lg_remove, path_bytes(where))


def sweep(root: Path, *, dry_run: bool = True) -> list[Swept]:
    """Removes what crashes have left."""
    found: list[Swept] = []
    handle = ffi.new_handle(found)
    call(lib.lg_sweep, path_bytes(root), int(dry_run), lib.lgpy_swept, handle)
    return found


def rollback(where: Path, reason: str = "") -> Generation:
    """Records that the run goes back to a checkpoint: later ones are discarded, and nothing is deleted.

    Returns:
        The record's generation; rolling back to before it is another record.
    """
    out = ffi.new("lg_generation *")
    call(lib.lg_rollback, path_bytes(where), ffi.new("char[]", reason.encode()), out)
    return _generation(out)


@ffi.def_extern(name="lgpy_pruned")  # type: ignore[untyped-decorator]
def _call_pruned(item: Any, arg: Any) -> None:
    ffi.from_handle(arg).append(
        Pruned(
            text_of(item.name),
            int(item.step),
            _generation(item.generation),
            int(item.bytes),
            bool(item.removed),
            text_of(item.reason),
        )
    )


@ffi.def_extern(name="lgpy_swept")  # type: ignore[untyped-decorator]
def _call_swept(name: Any, size: int, arg: Any) -> None:
    ffi.from_handle(arg).append(Swept(text_of(name), int(size)))
