# SPDX-License-Identifier: Apache-2.0
"""What the tensors of modules are called, whatever they are wrapped in: the names are those of the bare model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import nn

# Children whose place in the path says nothing: nobody else calls a child so.
_TRANSPARENT = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
# Wrappers whose only child is called "module", as a child of anybody may be.
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "AveragedModel")


class Place(NamedTuple):
    """A module in the tree of modules."""

    path: str  # of the bare model: "h.0.attn", "" for the root
    module: nn.Module
    ddp: Any  # the DistributedDataParallel around it that keeps all of it in step, or None


def is_a(value: Any, *names: str) -> bool:
    """Whether it is of one of these classes of torch, which are not imported for the question."""
    kind: Any = type(value)
    return _is(kind, names)


@functools.lru_cache(maxsize=4096)
def _is(kind: Any, names: tuple[str, ...]) -> bool:
    return any(c.__module__.split(".")[0] == "torch" and c.__qualname__ in names for c in kind.__mro__)


def walk(root: nn.Module, path: str = "", ddp: Any = None) -> Iterator[Place]:
    """All modules with their paths. A module that is there twice comes twice, as in ``state_dict()``."""
    yield Place(path, root, ddp)
    wrapper = is_a(root, *_WRAPPERS)
    if wrapper and is_a(root, "DistributedDataParallel") and not root.parameters_to_ignore:
        ddp = root
    for child, module in root._modules.items():
        if module is None:
            continue
        if child in _TRANSPARENT or (wrapper and child == "module"):
            yield from walk(module, path, ddp)
        else:
            yield from walk(module, f"{path}.{child}" if path else child, ddp)


def join(*parts: str) -> str:
    """Parts of a name with dots between those that are not empty."""
    return ".".join([p for p in parts if p])


def some(names: list[str], limit: int = 5) -> str:
    """The first of many names, for messages."""
    shown = ", ".join([f'"{n}"' for n in names[:limit]])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module keeps state beside its tensors."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state
