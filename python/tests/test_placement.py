# SPDX-License-Identifier: Apache-2.0
"""Placements of DTensors as layouts, against what torch itself computes."""

import itertools
import types

import lastgood
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lastgood.placement import layout_of, splits_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


def coordinates(sizes):
    return list(itertools.product(*(range(n) for n in sizes)))


def parts(shape, sizes, placements):
    """Each rank's part of a tensor of indices, cut by torch's own code from left to right."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = []
    for coordinate in coordinates(sizes):
        part = whole
        for axis, p in enumerate(placements):
            if not isinstance(p, Replicate):
                part = p._split_tensor(part, sizes[axis], with_padding=False)[0][coordinate[axis]]
        found.append(part)
    return found


def check(shape, sizes, placements, layout, offsets=True):
    for rank, (coordinate, part) in enumerate(zip(coordinates(sizes), parts(shape, sizes, placements), strict=True)):
        assert layout.local_shape(rank, shape) == tuple(part.shape), (rank, placements)
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
        assert tuple(local) == tuple(part.shape)
        if part.numel() and offsets:
            assert layout.offset(rank, shape) == tuple(offset), (rank, placements)


@given(st.data())
def test_k08_shards_are_where_torch_puts_them(data):
    """F124, F125, F127, F128, F131, F136: uneven, empty, nested, more ranks than rows."""
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 17), min_size=ndim, max_size=ndim)))
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placement = st.one_of(st.just(Replicate()), st.integers(0, ndim - 1).map(Shard))
    placements = tuple(data.draw(st.lists(placement, min_size=len(sizes), max_size=len(sizes))))
    layout = lastgood.Layout(sizes, splits_of("w", sizes, placements))
    check(shape, sizes, placements, layout)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 3))
def test_fsdp_over_tensor_parallelism_cuts_by_the_inner_axis_first(dp, tp, rows, columns):
    """As fully_shard cuts what tensor parallelism has cut already."""
    sizes, shape = (dp, tp), (rows, columns)
    splits = splits_of("w", sizes, (_StridedShard(0, split_factor=tp), Shard(0)))
    layout = lastgood.Layout(sizes, splits)
    whole = torch.arange(rows * columns).reshape(shape)
    for rank, (i, j) in enumerate(coordinates(sizes)):
        inner = Shard(0)._split_tensor(whole, tp, with_padding=False)[0][j]
        part = Shard(0)._split_tensor(inner, dp, with_padding=False)[0][i]
        assert layout.local_shape(rank, shape) == tuple(part.shape)
        if part.numel():
            assert layout.offset(rank, shape) == (int(part[0, 0]) // columns, 0)


@pytest.mark.parametrize(
    ("sizes", "placements", "order"),
    [
        ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), [1, 0]),
        ((2, 3, 2), (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)), [2, 1, 0]),
        ((2, 3, 2), (_StridedShard(0, split_factor=2), Shard(0), Shard(0)), None),
        ((2, 3, 2), (_StridedShard(0, split_factor=3), Replicate(), Shard(0)), None),
        ((2, 3, 2), (Shard(0), _StridedShard(0, split_factor=2), Shard(0)), [0, 2, 1]),
    ],
)
def test_the_factor_of_a_strided_shard_says_which_axes_cut_before(sizes, placements, order):
    if order is None:
        try:
            found = [s.axis for s in splits_of("w", sizes, placements)]
        except lastgood.UnsupportedError as why:
            assert "no layout has" in str(why)
            return
        order = [a for s in found for a in [s]]
    shape = (36, 2)
    layout = lastgood.Layout(sizes, splits_of("w", sizes, placements))
    assert [s.axis for s in splits_of("w", sizes, placements)] == order
    check(shape, sizes, placements, layout)


def test_a_strided_shard_of_its_own_takes_a_piece_of_each_third(root):
    """As of a fused query-key-value matrix: several boxes on each rank."""
    sizes, shape, placements = (2,), (12, 5), (_StridedShard(0, split_factor=3),)
    layout = lastgood.Layout(sizes, splits_of("w", sizes, placements))
    held = parts(shape, sizes, placements)
    assert [layout.local_shape(r, shape) for r in range(2)] == [tuple(p.shape) for p in held]
    assert held[0][:, 0].tolist() == [0, 5, 20, 25, 40, 45]

    import threading

    def work(comm):
        with lastgood.Session(root, comm) as session, session.save(1) as save:
            save.tensor("w", held[comm.rank], shape=shape, layout=layout)

    threads = [threading.Thread(target=work, args=(c,)) for c in lastgood.ThreadCommunicator.create(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.equal(lastgood.open(root)["w"].torch(), torch.arange(60).reshape(12, 5))


def test_partial_sums_are_refused_by_name():
    with pytest.raises(lastgood.UnsupportedError, match=r'"w": its placement .* is a partial sum.*redistribute'):
        splits_of("w", (2, 2), (Shard(0), Partial()))
    with pytest.raises(lastgood.UnsupportedError, match="no layout has"):
        splits_of("w", (2, 3), (_StridedShard(0, split_factor=5), Shard(0)))


def test_an_order_of_axes_that_is_torchs_own_is_kept():
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    placements = (Shard(0), Shard(0))
    assert [s.axis for s in splits_of("w", (2, 3), placements, order)] == [1, 0]
    strided = DTensorSpec._convert_shard_order_to_StridedShard(
        order, placements, types.SimpleNamespace(size=lambda i: (2, 3)[i])
    )
    assert [s.axis for s in splits_of("w", (2, 3), strided)] == [1, 0]
    assert layout_of is not None
