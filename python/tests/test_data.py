# SPDX-License-Identifier: Apache-2.0
"""The loader's position, in samples of the whole run."""

import random

import lastgood
import lastgood.data
import numpy as np
import pytest
import torch
from counting import calls
from hypothesis import given
from hypothesis import strategies as st
from lastgood.random import RandomPart
from positions import Drawing, Numbers, as_list, flat, global_steps, loader, on_mesh, ranks, resume, save, train


def order(n, count, seed=0, shuffle=True):
    return lastgood.Sampler(n, seed, shuffle=shuffle).peek(count)


# ---------------------------------------------------------------- whole positions


@pytest.mark.parametrize("n", range(1, 6))
def test_k10_f169_what_is_loaded_is_what_was_saved_at_every_position(n, roots):
    for consumed in range(n + 1):
        root = roots.new()
        one = loader(n, shuffle=True, seed=n)
        one.used(consumed)
        save(root, loader=one)
        other = loader(n, shuffle=True)
        resume(root, loader=other)
        assert other.position == one.position == divmod(consumed, n)
        assert other.seed == n
        root = roots.new()
        save(root, loader=other)
        again = loader(n, shuffle=True)
        resume(root, loader=again)
        assert again.position == one.position
        assert flat(train(again, 2 * n)) == order(n, 2 * n + consumed, seed=n)[consumed:]


@pytest.mark.parametrize("workers", range(4))
def test_k10_f169_with_any_number_of_workers(workers, roots):
    n = 5
    for consumed in range(n + 1):
        root = roots.new()
        one = loader(n, shuffle=True, num_workers=workers, persistent_workers=workers > 1)
        train(one, consumed)
        save(root, loader=one)
        other = loader(n, shuffle=True, num_workers=workers)
        resume(root, loader=other)
        assert flat(train(other, 3)) == order(n, consumed + 3)[consumed:]


def test_k10_f170_a_second_resume_in_an_epoch_goes_on_from_the_absolute_position(roots):
    first, second = roots.new(), roots.new()
    one = loader(100)
    train(one, 30)
    save(first, loader=one)
    two = loader(100)
    resume(first, loader=two)
    train(two, 10)
    save(second, loader=two)
    three = loader(100)
    resume(second, loader=three)
    assert three.position == (0, 40)
    assert train(three, 1) == [[[40]]]


def test_k10_f172_nothing_that_was_used_is_seen_again_with_workers(root):
    one = loader(200, 4, num_workers=2)
    train(one, 25)
    save(root, loader=one)
    two = loader(200, 4, num_workers=2)
    resume(root, loader=two)
    assert flat(list(two)) == list(range(100, 200))


def test_k10_f172_an_iterator_may_be_made_before_the_state_is_applied_but_not_read(root):
    one = loader(20)
    train(one, 7)
    save(root, loader=one)
    two = loader(20, num_workers=1)
    made = iter(two)  # fetches nothing yet
    resume(root, loader=two)
    assert next(made) == [7]


def test_k10_f193_an_iterator_that_was_read_before_the_state_was_applied_cannot_go_on(root):
    one = loader(20)
    train(one, 7)
    save(root, loader=one)
    for workers in (0, 2):
        two = loader(20, num_workers=workers)
        made = iter(two)
        assert next(made) == [0]
        resume(root, loader=two)
        assert two.last_samples == 0
        with pytest.raises(lastgood.StateError, match="made before the position was restored"):
            next(made)
        assert next(iter(two)) == [7]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_k10_f173_what_was_fetched_but_not_used_comes_again(workers, root):
    one = loader(50, num_workers=workers, **({"prefetch_factor": 4} if workers else {}))
    train(one, 3)
    extra = next(one.batches())
    assert (extra, one.position, one.last_samples) == ([[3]], (0, 3), 1)
    save(root, loader=one)
    two = loader(50, num_workers=workers)
    resume(root, loader=two)
    assert train(two, 1) == [[[3]]]


def test_k10_f175_a_new_object_begins_with_the_next_sample(root):
    one = loader(9, shuffle=True, seed=3)
    train(one, 5)
    save(root, loader=one)
    two = loader(9, shuffle=True, seed=4)
    of = resume(root, loader=two)
    assert next(iter(two)) == [order(9, 9, seed=3)[5]]
    assert "seed 3" in of.notes[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_k10_f176_any_number_of_ranks_sees_the_same_global_sequence(shuffle):
    wanted = global_steps(52, 1, 15, batch_size=8, shuffle=shuffle)
    assert [len(step) for step in wanted] == [8, 8, 8, 8, 8, 8, 4] * 2 + [8]
    for world, batch in ((2, 4), (4, 2)):
        assert global_steps(52, world, 15, batch_size=batch, shuffle=shuffle) == wanted
    assert global_steps(52, 2, 15, accumulate=2, batch_size=2, shuffle=shuffle) == wanted


def test_k10_f178_a_resume_shortens_one_epoch_only(root):
    one = loader(10)
    train(one, 4)
    save(root, loader=one)
    two = loader(10)
    resume(root, loader=two)
    lengths = []
    while two.epoch < 3:
        length = 0
        for _ in two:
            two.used(two.last_samples)
            length += 1
        lengths.append(length)
    assert lengths == [6, 10, 10]


def test_k10_f179_seeking_takes_no_time(root):
    n = 10**7
    one = loader(range(n), 4, shuffle=True)
    one.used(n - 1000)
    save(root, loader=one)
    first = []

    def seek():
        two = loader(range(n), 4, shuffle=True)
        resume(root, loader=two)
        first.append(next(iter(two)))

    assert calls(seek) < 10000
    assert first == [lastgood.Sampler(n).peek(4, n - 1000)] * 2


def test_k10_f181_f182_the_batch_in_the_epoch_is_kept(root):
    one = loader(200, 2)
    for number, _ in enumerate(one, 1):
        one.used(one.last_samples)
        if number == 40:
            save(root, loader=one)
            break
    two = loader(200, 2)
    resume(root, loader=two)
    assert next(iter(two)) == [80, 81]


def test_k10_f184_accumulation_counts_samples():
    one = loader(1000, 2)
    train(one, 10, accumulate=4)
    assert one.position == (0, 80)


def test_k10_f185_f188_the_batch_size_may_change_and_is_noted(root):
    one = loader(100, 8, shuffle=True)
    train(one, 3)
    save(root, loader=one)
    two = loader(100, 4, shuffle=True)
    of = resume(root, loader=two)
    assert flat(train(two, 2)) == order(100, 32)[24:]
    assert of.notes == [
        '"loader": micro-batches of all ranks together had 8 samples and have 4 now; '
        "the order of samples stays, at sample 24 of epoch 0"
    ]


def test_k10_f187_the_end_of_an_epoch_is_the_begin_of_the_next(root):
    one = loader(9, 3)
    train(one, 3)
    assert one.position == (1, 0)
    save(root, loader=one)
    assert lastgood.open(root).state["loader.consumed"] == 0
    two = loader(9, 3)
    resume(root, loader=two)
    assert len(list(two)) == 3


def test_k10_another_data_set_is_refused_with_both_sizes(root):
    save(root, loader=loader(100))
    other = loader(90)
    with pytest.raises(lastgood.MismatchError, match="had 100 samples when saved and has 90 now"):
        resume(root, loader=other)
    assert other.position == (0, 0)


def test_k10_a_checkpoint_without_position_is_an_error_unless_it_need_not_be_exact(root):
    save(root)
    one = loader(10)
    one.used(3)
    with pytest.raises(lastgood.MissingError, match=r"loader\.samples"):
        resume(root, loader=one)
    of = resume(root, exact=False, loader=one)
    assert (of.not_restored, one.position) == (["loader"], (0, 3))


def test_k08_two_loaders_of_a_state_have_positions_of_their_own(root):
    one, two = loader(10), loader(20)
    one.used(3)
    two.used(15)
    save(root, loader=one, other=two)
    three, four = loader(10), loader(20)
    resume(root, loader=three, other=four)
    assert (three.consumed, four.consumed) == (3, 15)


# ------------------------------------------------------------- epochs and their ends


def test_a_pass_that_nobody_reports_as_used_is_not_repeated_silently():
    one = loader(4)
    assert flat(list(one)) == [0, 1, 2, 3]
    with pytest.raises(lastgood.StateError, match="nothing was reported as used"):
        next(iter(one))
    one.used(4)
    assert one.epoch == 1
    for _ in one:
        break  # left before its end: what was not used comes again
    assert flat(list(one)) == [0, 1, 2, 3]


def test_iterate_ends_where_an_epoch_begins():
    one = loader(5, 2, drop_last=False)
    found = []
    for batch in one.iterate(epochs=3):
        found.append(batch)
        one.used(one.last_samples)
    assert found == 3 * [[0, 1], [2, 3], [4]]
    assert one.position == (3, 0)
    assert list(one.iterate(epochs=3)) == []
    assert list(one.iterate(epochs=3)) == []


def test_drop_last_leaves_out_the_tail_and_begins_the_next_epoch():
    one = loader(10, 4, drop_last=True)
    assert train(one, 3) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[0, 1, 2, 3]]]
    assert one.position == (1, 4)
    train(one, 1)
    assert one.position == (2, 0)
    assert len(one) == 2


def test_drop_last_drops_what_does_not_fill_a_step_of_all_micro_batches():
    one = loader(10, 2, drop_last=True)
    assert flat(train(one, 4, accumulate=3)) == [0, 1, 2, 3, 4, 5] * 4


def test_drop_last_after_a_resume_with_a_larger_step(root):
    one = loader(10, 1, drop_last=True)
    train(one, 7)
    save(root, loader=one)
    two = loader(10, 5, drop_last=True)
    resume(root, loader=two)
    assert train(two, 1) == [[[0, 1, 2, 3, 4]]]
    assert two.position == (1, 5)


def test_drop_last_of_all_there_is_is_an_error():
    with pytest.raises(lastgood.InvalidError, match=r"batch_size 4 \* 2 ranks \* accumulate 3 = 24 samples.* has 10"):
        next(loader(10, 4, who=ranks(0, 2), drop_last=True).batches(3))


@given(
    n=st.integers(1, 40),
    world=st.integers(1, 5),
    batch=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    drop=st.booleans(),
    begin=st.integers(0, 100),
)
def test_k08_k10_every_rank_gets_as_many_micro_batches_and_together_they_are_the_order(
    n, world, batch, accumulate, drop, begin
):
    whole = batch * world * accumulate
    drop = drop and whole <= n
    all_ranks = [loader(n, batch, who=ranks(r, world), shuffle=True, drop_last=drop) for r in range(world)]
    for one in all_ranks:
        one.used(begin)
    iterators = [one.batches(accumulate) for one in all_ranks]
    at = lastgood.Sampler(n)
    at.advance(begin)
    for _ in range(8):
        left = n - at.consumed
        if drop and left < whole:
            at.advance(left)
            left = n
        parts = [next(i) for i in iterators]
        taken = [x for micro in zip(*parts, strict=True) for b in micro for x in b]
        assert all(len(p) == accumulate and all(p) for p in parts)  # nobody gets an empty one
        sizes = {len(b) for p in parts for b in p}
        assert max(sizes) - min(sizes) <= 1
        assert len(taken) == (whole if left >= whole else max(left, world * accumulate))
        assert taken == at.peek(len(taken))
        assert {one.last_samples for one in all_ranks} == {len(taken)}
        for one in all_ranks:
            one.used(one.last_samples)
        at.advance(len(taken))
        if drop and n - at.consumed < whole:
            at.advance(n - at.consumed)
        assert {one.position for one in all_ranks} == {(at.epoch, at.consumed)}


def test_ranks_that_share_samples_get_the_same_ones():
    mesh = ({"dp": 2, "tp": 2}, ["dp"])
    found = [train(loader(8, 2, who=on_mesh(r, *mesh)), 2) for r in range(4)]
    assert found[0] == found[1] == [[[0, 1]], [[4, 5]]]
    assert found[2] == found[3] == [[[2, 3]], [[6, 7]]]


def test_len_is_that_of_a_whole_epoch():
    one = loader(10, 3)
    train(one, 1)
    assert len(one) == 4
    assert len(loader(10, 3, who=ranks(0, 2))) == 2
    assert len(loader(10, 3, who=ranks(0, 2), drop_last=True)) == 1


# ------------------------------------------------------------------ random numbers


def draws(one, steps, accumulate=1):
    """What each sample of a loader drew, in each epoch."""
    found = {}
    for batches in train(one, steps, accumulate):
        for i, *drawn in [sample for batch in batches for sample in batch]:
            found.setdefault(i, []).append(drawn)
    return found


def test_what_a_sample_draws_depends_on_seed_epoch_and_sample_alone():
    n = 12
    wanted = draws(loader(Drawing(n), 4, shuffle=True, seed=5), 6)
    assert all(len(d) == 2 and d[0] != d[1] for d in wanted.values())  # another one in each epoch
    assert len({str(d) for d in wanted.values()}) == n
    for workers in (1, 3):
        assert draws(loader(Drawing(n), 2, shuffle=True, seed=5, num_workers=workers), 12) == wanted
    for world in (2, 3):
        found = {}
        for rank in range(world):
            found |= draws(loader(Drawing(n), 12 // world, who=ranks(rank, world), shuffle=True, seed=5), 1)
        assert found == {i: d[:1] for i, d in wanted.items()}
    assert draws(loader(Drawing(n), 4, shuffle=True, seed=6), 6) != wanted


class DrawingCollate:
    def __call__(self, batch):
        return [(i, random.random(), float(np.random.rand()), torch.rand(()).item()) for i in batch]


def test_what_the_collate_function_draws_is_the_same_with_any_number_of_workers_and_after_a_resume(root):
    one = loader(12, 3, collate_fn=DrawingCollate())
    wanted = train(one, 8)
    assert wanted[0] != wanted[4]  # the same samples in another epoch
    two = loader(12, 3, collate_fn=DrawingCollate(), num_workers=2)
    assert train(two, 3) == wanted[:3]
    save(root, loader=two)
    three = loader(12, 3, collate_fn=DrawingCollate())
    resume(root, loader=three)
    assert train(three, 5) == wanted[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_and_making_iterators_leave_the_trainers_streams_alone(workers):
    def streams():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = streams()
    one = loader(Drawing(12), 3, num_workers=workers, collate_fn=torch.utils.data.default_collate)
    train(one, 3)
    iter(one)
    next(iter(one))
    assert streams() == before


def test_k09_f142_resumed_in_the_middle_each_batch_draws_what_it_would_have_drawn(root):
    def run(one, steps):
        found = []
        for batches in one.batches():
            found.append((batches, torch.rand(()).item()))  # the trainer draws too
            one.used(one.last_samples)
            if len(found) == steps:
                return found
        return None

    for made in (torch, np.random, random):
        getattr(made, "manual_seed", getattr(made, "seed", None))(1)
    one = loader(Drawing(40), 4, shuffle=True)
    run(one, 7)
    save(root, loader=one, random=RandomPart())
    wanted = run(one, 7)
    two = loader(Drawing(40), 4, shuffle=True, num_workers=2)
    resume(root, loader=two, random=RandomPart())
    iter(two)
    assert run(two, 7) == wanted


def test_k09_f143_three_epochs_in_one_go_are_three_runs_of_one_epoch(roots):
    def epoch(one):
        found = []
        for batch in one:
            found.append(batch)
            one.used(one.last_samples)
        return found

    whole = loader(Drawing(10), 2, shuffle=True)
    wanted = [epoch(whole) for _ in range(3)]
    assert wanted[0] != wanted[1] != wanted[2]
    found, root = [], None
    for _ in range(3):
        one = loader(Drawing(10), 2, shuffle=True)
        if root:
            resume(root, loader=one)
        found.append(epoch(one))
        root = roots.new()
        save(root, loader=one)
    assert found == wanted


class InBatches(Drawing):
    def __init__(self, n):
        super().__init__(n)
        self.calls = 0

    def __getitems__(self, indices):
        self.calls += 1
        return [self[i] for i in indices]


def test_batched_reads_are_used_where_they_are_asked_for():
    data = InBatches(12)
    exact = draws(loader(data, 4, shuffle=True), 3)
    assert data.calls == 0
    assert exact == draws(loader(Drawing(12), 4, shuffle=True), 3)
    batched = draws(loader(data, 4, shuffle=True, read_batches=True), 3)
    assert data.calls == 3
    assert batched.keys() == exact.keys()
    assert batched == draws(loader(data, 4, shuffle=True, read_batches=True, num_workers=2), 3)
    with pytest.raises(lastgood.InvalidError, match="Drawing has no __getitems__"):
        loader(Drawing(3), read_batches=True)


# ------------------------------------------------------------------------ as torch's


def mark(worker):
    torch.utils.data.get_worker_info().dataset.mark = worker + 10


class Marked(Numbers):
    mark = 0

    def __getitem__(self, i):
        return i, self.mark


def test_a_worker_init_function_finds_the_data_set():
    one = loader(Marked(8), 2, num_workers=2, worker_init_fn=mark)
    assert flat(train(one, 4)) == [(i, 10 + i // 2 % 2) for i in range(8)]


def test_it_is_a_loader_of_torch_and_collates_like_one():
    one = lastgood.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(6.0)), 4)
    assert isinstance(one, torch.utils.data.DataLoader)
    (batch,) = next(iter(one))
    assert torch.equal(batch, torch.arange(4.0))
    assert len(one.dataset) == 6
    assert "consumed 0" in repr(one)


def test_persistent_workers_stay(tmp_path):
    one = loader(Pids(6), 3, num_workers=1, persistent_workers=True)
    first = set(flat(train(one, 2)))
    assert set(flat(train(one, 2))) == first
    assert len(first) == 1


class Pids(Numbers):
    def __getitem__(self, i):
        import os

        return os.getpid()


def test_spawned_workers_work():
    one = loader(Drawing(4), 2, num_workers=1, multiprocessing_context="spawn")
    assert draws(one, 2) == draws(loader(Drawing(4), 2), 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampler": [1]}, "takes no sampler"),
        ({"batch_sampler": [[1]]}, "takes no batch_sampler"),
        ({"generator": torch.Generator()}, "takes no generator"),
        ({"in_order": False}, "in_order=False"),
        ({"batch_size": None}, "batch_size is None"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_options_that_would_take_the_order_away_are_refused(options, text):
    with pytest.raises(lastgood.InvalidError, match=text):
        lastgood.data.DataLoader(Numbers(3), **options)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_an_iterable_data_set_without_shards_is_refused_with_the_way_out():
    with pytest.raises(lastgood.UnsupportedError, match=r"Stream is an iterable data set.*Sharded\(shards, open\)"):
        lastgood.data.DataLoader(Stream())


def test_an_error_of_the_data_set_is_raised_and_moves_nothing():
    class Broken(Numbers):
        def __getitem__(self, i):
            if i == 3:
                raise OSError("gone")
            return i

    for workers in (0, 1):
        one = loader(Broken(6), num_workers=workers)
        with pytest.raises(OSError, match="gone"):
            train(one, 6)
        assert one.position == (0, 3)


def test_binding_other_ranks_ends_an_iterator():
    one = loader(8)
    made = one.batches()
    next(made)
    one.bind(ranks(0, 1))
    next(made)
    one.bind(ranks(1, 2))
    with pytest.raises(lastgood.StateError, match="the ranks were bound"):
        next(made)


# --------------------------------------------------------------- workers and saves


def test_k20_workers_that_start_during_a_save_in_the_background_harm_neither(root):
    weights = torch.arange(8 << 20, dtype=torch.float32)
    one = loader(Drawing(64), 4, num_workers=2)
    wanted = draws(loader(Drawing(64), 4), 6)
    with lastgood.Session(root, timeout=60) as session:
        session.resume()
        with session.launch(1) as saving:
            saving.tensors({"w": weights}, lazy=True)
        found = draws(one, 6)  # starts workers while it is written
        session.fence()
        assert session.wait().step == 1
    assert found == wanted
    assert torch.equal(lastgood.load(root, framework="torch")["w"], weights)


# ------------------------------------------------------------------------- sampler


def turns(n, world, count, begin=0, **options):
    made = [lastgood.data.ElasticSampler(n, **options) for _ in range(world)]
    for rank, sampler in enumerate(made):
        sampler.bind(ranks(rank, world))
        sampler.used(begin)
    return [list(s)[:count] for s in made]


def test_k10_f176_a_sampler_gives_any_number_of_ranks_the_same_order():
    wanted = order(24, 24, seed=2)
    for world in (1, 2, 3, 4):
        found = turns(24, world, 24, seed=2)
        assert [x for row in zip(*found, strict=True) for x in row] == wanted


def test_a_sampler_gives_all_ranks_as_many_indices():
    found = turns(10, 4, 10, seed=1)
    assert [len(f) for f in found] == [3] * 4
    taken = [x for row in zip(*found, strict=True) for x in row]
    assert taken == lastgood.Sampler(10, 1).peek(12)
    found = turns(10, 4, 10, seed=1, drop_last=True)
    assert [len(f) for f in found] == [2] * 4
    with pytest.raises(lastgood.InvalidError, match="drops everything"):
        turns(3, 4, 1, drop_last=True)


def test_k10_a_sampler_in_a_loader_of_ones_own_goes_on_where_it_was(root):
    def make():
        sampler = lastgood.data.ElasticSampler(Numbers(50), seed=4)
        own = torch.utils.data.DataLoader(
            Numbers(50), 5, sampler=sampler, num_workers=2, collate_fn=as_list, generator=torch.Generator()
        )
        return sampler, own

    sampler, own = make()
    for number, _ in enumerate(own, 1):
        sampler.used(5)
        if number == 3:
            break
    save(root, sampler=sampler)
    again, own = make()
    resume(root, sampler=again)
    assert again.position == (0, 15)
    assert flat(list(own)) == order(50, 50, seed=4)[15:]
    assert len(own) == 10


def test_k10_f193_a_sampler_that_is_being_read_is_not_moved(root):
    one = lastgood.data.ElasticSampler(10)
    save(root, sampler=one)
    made = iter(one)
    next(made)
    with pytest.raises(lastgood.StateError, match="make iterators after resume"):
        resume(root, sampler=one)
    made.close()
    resume(root, sampler=one)
    for _ in torch.utils.data.DataLoader(range(10), sampler=one, num_workers=2, generator=torch.Generator()):
        break
    resume(root, sampler=one)  # that iterator is gone


def test_a_sampler_hands_out_no_batches():
    one = lastgood.data.ElasticSampler(10)
    assert one.last_samples == 0
    with pytest.raises(lastgood.InvalidError, match="hands out no batches"):
        one.batches()


def test_importing_lastgood_loads_no_torch():
    import subprocess
    import sys

    code = "import sys, lastgood; assert 'torch' not in sys.modules and 'lastgood.data' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
