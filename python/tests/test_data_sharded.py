# SPDX-License-Identifier: Apache-2.0
"""Data that is read shard by shard."""

import collections
import random

import lastgood
import lastgood.data
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lastgood.data.iterable import Deal, Progress, redealt
from positions import Spoiled, as_list, flat, ranks, resume, save, save_on_ranks, train


class Records:
    """Opens shard s of the given sizes: (s, 0), (s, 1), … and counts what is read."""

    def __init__(self, sizes, sequence=False):
        self.sizes, self.sequence, self.read = sizes, sequence, 0

    def __call__(self, shard):
        rows = [(shard, i) for i in range(self.sizes[shard])]
        return rows if self.sequence else self._read(rows)

    def _read(self, rows):
        for row in rows:
            self.read += 1
            yield row


def sharded(sizes, batch_size=1, who=None, records=None, **options):
    data = lastgood.data.Sharded(range(len(sizes)), records or Records(sizes))
    made = lastgood.data.DataLoader(data, batch_size, collate_fn=as_list, **options)
    if who:
        made.bind(who)
    return made


SIZES = [3, 5, 2, 7, 4, 1]


def test_one_lane_reads_shard_after_shard_over_the_ends_of_epochs():
    wanted = [(s, i) for s in lastgood.Sampler(6, 3).peek(12) for i in range(SIZES[s])]
    one = sharded(SIZES, 2, shuffle=True, seed=3)
    assert flat(train(one, 22)) == wanted
    assert (one.epoch, one.consumed) == (1, 44)
    in_order = sharded(SIZES, 11)
    assert flat(train(in_order, 2)) == [(s, i) for s in range(6) for i in range(SIZES[s])]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_k10_f173_a_resume_goes_on_exactly_whatever_was_fetched(workers, sequence, roots):
    def make():
        return sharded(SIZES, 2, records=Records(SIZES, sequence), shuffle=True, num_workers=workers)

    wanted = train(make(), 20)
    for used in (0, 1, 7):
        root = roots.new()
        one = make()
        assert train(one, used) == wanted[:used]
        next(one.batches())  # handed out and not used
        save(root, loader=one)
        two = make()
        resume(root, loader=two)
        assert train(two, 20 - used) == wanted[used:]
        assert two.consumed == 40


def test_k10_f179_a_sequence_is_not_read_again_and_a_stream_is_read_up_to_the_position(root):
    one = sharded([100, 100], 10)
    train(one, 5)
    save(root, loader=one)
    for sequence, read in ((True, 0), (False, 51)):
        records = Records([100, 100], sequence)
        two = sharded([100, 100], 1, records=records)
        resume(root, loader=two)
        assert train(two, 1) == [[[(0, 50)]]]
        assert records.read == read


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 1), (3, 1)), ((2, 2), (3, 1)), ((1, 3), (2, 2))])
def test_k08_k10_another_number_of_ranks_or_workers_reads_every_sample_once(before, after, roots):
    sizes = [7, 5, 6, 8, 4, 6, 7, 5, 6, 7, 8, 5]  # one epoch
    found = []
    root = roots.new()
    world, workers = before

    def first(who):
        made = sharded(sizes, 2, who, shuffle=True, num_workers=workers if workers > 1 else 0)
        found.extend(train(made, 4))
        return {"loader": made}

    if world > 1:
        save_on_ranks(root, world, first)
    else:
        save(root, **first(ranks()))
    world, workers = after
    notes = []
    iterators = []
    for rank in range(world):
        made = sharded(sizes, 1, ranks(rank, world), shuffle=True, num_workers=workers if workers > 1 else 0)
        notes.append(resume(root, ranks(rank, world), loader=made).notes)
        iterators.append((made, made.batches()))
    # Each lane reads what is left; the first sample of the second epoch ends it.
    rest = []
    for made, batches in iterators:
        lanes_over = set()
        source = made._source
        while len(lanes_over) < source.own_lanes:
            (batch,) = next(batches)
            lane, (turn, _) = source._handed[-1]
            if source.deal.of_lane(source._lane(lane), turn) >= len(sizes):
                lanes_over.add(lane)
            elif lane not in lanes_over:
                rest.extend(batch)
    counts = collections.Counter(flat(found) + rest)
    assert counts == {(s, i): 1 for s in range(len(sizes)) for i in range(sizes[s])}
    assert all("are dealt to" in n[0] for n in notes)


@given(
    lanes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_k08_however_often_shards_are_dealt_anew_each_is_finished_once(lanes, seed):
    draw = random.Random(seed)
    deal, used, finished = Deal(0, (), {}, 0), collections.Counter(), []
    for n in lanes:
        deal = deal._replace(lanes=n)
        progress = []
        for lane in range(n):
            turns = draw.randrange(4)
            finished += [deal.of_lane(lane, t) for t in range(turns)]
            current = deal.of_lane(lane, turns)
            more = draw.randrange(3)
            used[current] += more
            progress.append(Progress(turns, used[current] if more else 0))
        assert len({deal.of_lane(lane, p.turn) for lane, p in enumerate(progress)}) == n
        deal = redealt(deal, progress)
        assert len(set(finished)) == len(finished)
        assert set(finished) == set(range(deal.first)) | set(deal.done)
        assert {k: v for k, v in used.items() if v and k not in finished} == deal.partial
        left = [deal.number(card) for card in range(10)]
        assert left == [k for k in range(100) if k not in finished][:10]


def test_k10_f191_the_position_of_one_rank_of_several_is_refused(root):
    def make(who):
        made = sharded([3, 3, 3, 3], 1, who)
        train(made, 2)
        return {"loader": made}

    save_on_ranks(root, 4, make, spoil=lambda s: Spoiled(s, drop=[f"loader.rank.{r}" for r in (1, 2, 3)]))
    with pytest.raises(lastgood.MissingError, match="positions of 1 of 4 data-parallel ranks"):
        resume(root, ranks(0, 4), loader=sharded([3, 3, 3, 3], 1, ranks(0, 4)))


def test_k10_another_number_of_shards_is_refused(root):
    save(root, loader=sharded([1, 2, 3]))
    with pytest.raises(lastgood.MismatchError, match="had 3 samples when saved and has 4 now"):
        resume(root, loader=sharded([1, 2, 3, 4]))


@pytest.mark.parametrize("sequence", [False, True])
def test_a_shard_that_has_become_shorter_is_an_error(sequence, root):
    one = sharded([9, 9])
    train(one, 5)
    save(root, loader=one)
    two = sharded([4, 9], records=Records([4, 9], sequence))
    resume(root, loader=two)
    with pytest.raises(lastgood.MismatchError, match="shard 0 has 4 samples, and 5 of it were used"):
        train(two, 1)


def test_empty_shards_are_passed_over_and_nothing_but_empty_ones_is_an_error():
    assert flat(train(sharded([0, 2, 0, 1], 1), 4)) == [(1, 0), (1, 1), (3, 0), (1, 0)]
    with pytest.raises(lastgood.InvalidError, match="all 2 shards are empty"):
        train(sharded([0, 0]), 1)
    with pytest.raises(lastgood.InvalidError, match="no shards"):
        sharded([])


def test_only_whole_batches_that_were_handed_out_can_be_used():
    one = sharded(SIZES, 2, ranks(0, 3))
    batches = one.batches(2)
    next(batches)
    assert one.last_samples == 12
    for n in (5, 18, -6):
        with pytest.raises(lastgood.InvalidError, match="a micro-batch of all ranks has 6, and 2 were handed out"):
            one.used(n)
    one.used(6)
    one.used(6)
    assert one.last_samples == 0


class Drawn:
    """Samples that draw, from a shard whose order is drawn when it is opened."""

    def __call__(self, shard):
        rows = list(range(6))
        random.shuffle(rows)
        for row in rows:
            yield shard, row, torch.rand(()).item()


@pytest.mark.parametrize("workers", [0, 2])
def test_k09_f142_what_a_shard_draws_is_the_same_after_a_resume(workers, root):
    def make():
        return sharded([6] * 4, 2, records=Drawn(), shuffle=True, num_workers=workers)

    before = torch.get_rng_state().tolist(), random.getstate()
    wanted = train(make(), 20)
    assert len(set(flat(wanted))) == 40  # another draw in each epoch
    one = make()
    train(one, 4)
    save(root, loader=one)
    two = make()
    resume(root, loader=two)
    assert train(two, 16) == wanted[4:]
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_what_a_sharded_data_set_does_not_have_is_refused():
    one = sharded(SIZES)
    with pytest.raises(TypeError, match="for ever"):
        len(one)
    with pytest.raises(lastgood.InvalidError, match="count steps"):
        one.iterate(epochs=2)
    with pytest.raises(lastgood.InvalidError, match="no drop_last"):
        sharded(SIZES, drop_last=True)
    assert list(one.dataset) == [(s, i) for s in range(6) for i in range(SIZES[s])]
    assert next(iter(one)) == [(0, 0)]


def test_ranks_that_change_without_a_resume_are_an_error():
    one = sharded(SIZES)
    train(one, 1)
    one.bind(ranks(0, 2))
    with pytest.raises(lastgood.StateError, match="shards were dealt to 1 lanes and there are 2 now"):
        train(one, 1)
