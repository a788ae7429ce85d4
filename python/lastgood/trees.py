# SPDX-License-Identifier: Apache-2.0
"""Nested state and flat names: ``{"a": [x, y]}`` is ``a.0`` and ``a.1``."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from lastgood import arrays, dtypes
from lastgood.errors import ConflictError, InvalidError
from lastgood.tagged import Tensor


def is_module(value: Any) -> bool:
    """Whether it is a torch module, whose place its ``state_dict()`` takes."""
    torch = dtypes.imported("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def name_of(path: str, key: Any) -> str:
    """The name of an item of a container."""
    if type(key) is int:
        key = str(key)
    elif not isinstance(key, str):
        raise InvalidError(f'"{path}": {key!r} is a key of a container with arrays in it; use strings or integers')
    elif not key:
        raise InvalidError(f'"{path}": a key is the empty string')
    return f"{path}.{key}" if path else key


class Flat:
    """A tree taken apart.

    Attributes:
        tensors: arrays by name.
        aliases: names of arrays that are the very same object as an earlier one, and that one's name.
        skeleton: the tree with a reference in the place of each array.
        plain: the tree is just a dict of arrays by name, so that the names alone tell it.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self._first: dict[int, str] = {}
        if is_module(tree):
            tree = tree.state_dict()
        if arrays.is_array(tree) or not isinstance(tree, (dict, list, tuple)):
            raise InvalidError(
                f"a tree is a dict, list or tuple with arrays in it, or a module, not {type(tree).__name__}"
            )
        self.skeleton: Any = self._walk("", tree)
        self.plain = isinstance(tree, dict) and all(type(v) is Tensor and v.name == k for k, v in self.skeleton.items())

    def _walk(self, path: str, value: Any) -> Any:
        if arrays.is_array(value):
            return self._tensor(path, value)
        if is_module(value):
            value = value.state_dict()
        if isinstance(value, dict) and _holds_arrays(value):
            items = [(k, self._walk(name_of(path, k), v)) for k, v in value.items()]
            if isinstance(value, collections.defaultdict):
                return collections.defaultdict(value.default_factory, items)
            if isinstance(value, collections.OrderedDict):
                return collections.OrderedDict(items)
            return dict(items)
        if isinstance(value, (list, tuple, collections.deque)) and _holds_arrays(value):
            parts = [self._walk(name_of(path, i), v) for i, v in enumerate(value)]
            if isinstance(value, collections.deque):
                return collections.deque(parts, value.maxlen)
            return tuple(parts) if isinstance(value, tuple) else parts
        return value

    def _tensor(self, path: str, value: Any) -> Tensor:
        if path in self.tensors or path in self.aliases:
            raise ConflictError(f'"{path}" names two arrays of the tree: one by a key with a dot, one by nesting')
        first = self._first.setdefault(id(value), path)
        if first == path:
            self.tensors[path] = value
        else:
            self.aliases[path] = first
        return Tensor(path)


def _holds_arrays(value: Any) -> bool:
    if arrays.is_array(value) or is_module(value):
        return True
    if isinstance(value, dict):
        return any(_holds_arrays(v) for v in value.values())
    if isinstance(value, (list, tuple, collections.deque)):
        return any(_holds_arrays(v) for v in value)
    return False


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Name and array for each array of a tree, the same one again where it occurs again."""
    if arrays.is_array(tree):
        yield path, tree
    elif is_module(tree):
        yield from leaves(tree.state_dict(), path)
    elif isinstance(tree, dict):
        if _holds_arrays(tree):
            for key, value in tree.items():
                yield from leaves(value, name_of(path, key))
    elif isinstance(tree, (list, tuple, collections.deque)):
        for i, value in enumerate(tree):
            yield from leaves(value, name_of(path, i))


def replaced(tree: Any, found: dict[str, Any], path: str = "") -> Any:
    """A tree of the same structure, with ``found[name]`` in the place of each array. Named tuples stay what they are."""
    if arrays.is_array(tree):
        return found[path]
    if is_module(tree):
        return replaced(tree.state_dict(), found, path)
    if isinstance(tree, dict) and _holds_arrays(tree):
        items = [(k, replaced(v, found, name_of(path, k))) for k, v in tree.items()]
        if isinstance(tree, collections.defaultdict):
            return collections.defaultdict(tree.default_factory, items)
        return collections.OrderedDict(items) if isinstance(tree, collections.OrderedDict) else dict(items)
    if isinstance(tree, (list, tuple, collections.deque)) and _holds_arrays(tree):
        parts = [replaced(v, found, name_of(path, i)) for i, v in enumerate(tree)]
        if isinstance(tree, collections.deque):
            return collections.deque(parts, tree.maxlen)
        if isinstance(tree, tuple):
            return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        return parts
    return tree


def resolved(skeleton: Any, found: dict[str, Any]) -> Any:
    """A skeleton with the arrays in their places again."""
    if type(skeleton) is Tensor:
        return found[skeleton.name]
    if isinstance(skeleton, collections.defaultdict):
        items = [(k, resolved(v, found)) for k, v in skeleton.items()]
        return collections.defaultdict(skeleton.default_factory, items)
    if isinstance(skeleton, collections.Counter):
        return skeleton
    if isinstance(skeleton, dict):
        return type(skeleton)((k, resolved(v, found)) for k, v in skeleton.items())
    if isinstance(skeleton, collections.deque):
        return collections.deque((resolved(v, found) for v in skeleton), skeleton.maxlen)
    if isinstance(skeleton, (list, tuple)):
        return type(skeleton)(resolved(v, found) for v in skeleton)
    return skeleton
