# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint has and nothing in the state stands for: an optimizer, a layer, a scheduler that is not registered.

A rank of a pipeline has its own stage alone. So nobody is accused by itself: missing is what no rank has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lastgood.errors import ConflictError, MissingError
from lastgood.tensors import go_on_without

if TYPE_CHECKING:
    from lastgood.parts import Restoring

# Of single ranks: who is not here reads none of it.
_OF_RANK = re.compile(r"\.rank-\d+(\.|$)")
_FROZEN = "frozen."
# How many names a message holds.
_SHOWN = 5


class Leftover(NamedTuple):
    """What one rank has no counterpart of."""

    names: tuple[str, ...]  # all there are to have, sorted; the same on all ranks
    unknown: int  # bit i: nothing here stands for names[i]


def look(of: Restoring, keys: frozenset[str], ours: frozenset[str]) -> Leftover:
    """Compares the checkpoint with what has been described of the state.

    Args:
        keys: of parts of the state, whose values are theirs.
        ours: keys of values that are no part's.
    """
    known = _known(of, keys, ours)
    names = sorted(known)
    bits = "".join("0" if known[name] else "1" for name in reversed(names))
    return Leftover(tuple(names), int(bits or "0", 2))


def _known(of: Restoring, keys: frozenset[str], ours: frozenset[str]) -> dict[str, bool]:
    """Each name of the checkpoint, and whether this rank has its counterpart."""
    stored, state = dict(of.checkpoint), of.checkpoint.state
    # Of tied tensors one is enough.
    roots = {stored[name].alias_of or name for name in (*of.load.names, *of.known) if name in stored}
    found: dict[str, bool] = {}
    for name, tensor in stored.items():
        if not _OF_RANK.search(name):
            found[name] = (tensor.alias_of or name) in roots or _below(name, of.known)
    for key in state:
        first = key.partition(".")[0]
        if key.startswith(_FROZEN):
            name = key.removeprefix(_FROZEN)
            found[name] = found.get(name, False) or name in of.known
        elif first not in ours:
            for name in _names_of(key, state):
                found[name] = found.get(name, False) or first in keys or _below(name, of.known)
    return found


def _names_of(key: str, state: Mapping[str, Any]) -> list[str]:
    """What a value is about: itself, or the parameters whose options it holds."""
    prefix, groups, _ = key.partition(".groups.")
    value = state[key] if groups else None
    names = value.get("names") if isinstance(value, dict) else None
    if not isinstance(names, list):
        return [key]
    return [f"{prefix}.state.{name}" for name in names]


def _prefixes(name: str) -> Iterator[str]:
    """``a``, ``a.b``, ``a.b.c`` of ``a.b.c``."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)
    yield name


def _below(name: str, known: set[str]) -> bool:
    return any(prefix in known for prefix in _prefixes(name))


def settle(of: Restoring, found: Leftover) -> None:
    """Decides over all ranks together, and tells. *Collective* where there are several.

    Raises:
        MissingError: in exact mode: something that is not optional is in no rank's state; the same on all ranks.
    """
    missing, comm = found.unknown, of.ranks.comm
    if of.ranks.world > 1 and comm is not None:
        size = (len(found.names) + 7) // 8
        mine = found.unknown.to_bytes(size, "little") if found.unknown else b""
        for rank, theirs in enumerate(comm.all_gather(mine, of.timeout)):
            if len(theirs) not in (0, size):
                raise ConflictError(f"rank {rank} resumes from another checkpoint", rank=rank)
            missing &= int.from_bytes(theirs, "little")
    if not missing:
        return
    bits = bin(missing)[:1:-1].ljust(len(found.names), "0")
    names = [name for name, bit in zip(found.names, bits, strict=True) if bit == "1"]
    have = {p for name, bit in zip(found.names, bits, strict=True) if bit == "0" for p in _prefixes(name)}
    for optional in (False, True):
        some = [name for name in names if of.may_lack(name) == optional]
        if some:
            _tell(of, some, have, optional=optional)


def _tell(of: Restoring, names: list[str], have: set[str], *, optional: bool) -> None:
    """Names what is missing by the shortest names that nothing of the state begins with."""
    counts: dict[str, int] = {}
    for name in names:
        short = next((p for p in _prefixes(name) if p not in have), name)
        counts[short] = counts.get(short, 0) + 1
    shown = [f'"{short}"' + (f" ({n} names)" if n > 1 else "") for short, n in list(counts.items())[:_SHOWN]]
    more = f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else ""
    text = f"the checkpoint of step {of.checkpoint.step} has {', '.join(shown)}{more}, which the state has not"
    # Alone among ranks that cannot be asked, nobody knows what the others have.
    alone = of.ranks.world > 1 and of.ranks.comm is None
    if of.exact and not optional and not alone:
        raise MissingError(f"{text}: register it as it was saved; {go_on_without(list(counts))}")
    of.notes.append(f"{text}: nothing restores that")
