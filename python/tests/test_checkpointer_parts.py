# SPDX-License-Identifier: Apache-2.0
"""What a checkpointer is made of: durations, axes of a mesh, the line in the terminal."""

import io

import lastgood
import pytest
from lastgood.durations import seconds_of
from lastgood.parts import Axis
from lastgood.progress import Progress
from lastgood.ranks import ranks_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90), (0.5, 0.5), ("20min", 1200), ("20 min", 1200), ("4h", 14400), ("1.5h", 5400), ("1h30min", 5400),
        ("2d", 172800), ("90s", 90), ("1m 30 sec", 90), ("1-12:00:00", 129600), ("00:30:00", 1800), (" 4H ", 14400),
    ],
)  # fmt: skip
def test_durations_as_people_write_them(text, seconds):
    assert seconds_of("every", text) == seconds


@pytest.mark.parametrize(
    "text", ["", "4", "h", "4x", "4h!", "-4h", "0s", 0, -1, float("nan"), float("inf"), True, None, "1:30", "4hours"]
)
def test_what_is_no_duration_is_refused_by_the_option_s_name(text):
    with pytest.raises(lastgood.InvalidError, match=r"every is .*20min"):
        seconds_of("every", text)


class Mesh:
    """As a DeviceMesh shows itself."""

    def __init__(self, names, sizes, place):
        self.mesh_dim_names = names
        self._sizes = sizes
        self._place = place

    def size(self, axis=None):
        total = 1
        for n in self._sizes:
            total *= n
        return total if axis is None else self._sizes[axis]

    def get_coordinate(self):
        return self._place


class Comm:
    rank, size = 5, 8


def test_without_a_mesh_all_ranks_take_different_samples():
    ranks = ranks_of(Comm(), None, None)
    assert (ranks.rank, ranks.world, ranks.data_rank, ranks.data_world) == (5, 8, 5, 8)
    alone = ranks_of(None, None, None)
    assert (alone.rank, alone.world, alone.data_rank, alone.data_world, alone.comm) == (0, 1, 0, 1, None)


@pytest.mark.parametrize(
    ("names", "sizes", "place", "axes", "expected"),
    [
        (("dp", "tp"), (4, 2), (2, 1), None, (2, 4)),
        (("tp", "dp"), (2, 4), (1, 2), None, (2, 4)),
        (("dp_replicate", "dp_shard", "tp"), (2, 2, 2), (1, 0, 1), None, (2, 4)),
        (("replicate", "shard"), (2, 4), (1, 1), None, (5, 8)),
        (("pp", "fsdp"), (2, 4), (1, 1), None, (1, 4)),
        (("tp",), (8,), (5,), None, (0, 1)),
        (("a", "b"), (4, 2), (2, 1), ["b"], (1, 2)),
        (("dp", "tp"), (4, 2), (2, 1), [], (0, 1)),
    ],
)
def test_axes_of_a_mesh_say_who_takes_which_samples(names, sizes, place, axes, expected):
    ranks = ranks_of(Comm(), Mesh(names, sizes, place), axes)
    assert (ranks.data_rank, ranks.data_world) == expected
    assert ranks.mesh == tuple(Axis(n, s, p) for n, s, p in zip(names, sizes, place, strict=True))


@pytest.mark.parametrize(
    ("mesh", "axes", "words"),
    [
        (Mesh(None, (8,), (5,)), None, "no names"),
        (Mesh(("dp",), (4,), (1,)), None, "4 ranks, the run 8"),
        (Mesh(("dp",), (8,), None), None, "the mesh over all ranks"),
        (Mesh(("dp", "tp"), (4, 2), (2, 1)), ["ddp"], "'ddp'"),
        (Mesh(("dp", "tp"), (4, 2), (2, 1)), "dp", "list of names"),
        (None, ["dp"], "mesh="),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, axes, words):
    with pytest.raises(lastgood.InvalidError, match=words):
        ranks_of(Comm(), mesh, axes)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_line_has_step_rate_time_left_and_the_save():
    out, clock = Terminal(), Clock()
    progress = Progress(stream=out, now=clock)
    assert progress.shown
    for step in range(1, 11):
        clock.now += 0.5
        progress.update(step, 100, "save of step 5: writing" if step > 5 else "")
    lines = out.getvalue().split("\r\x1b[K")
    assert lines[1] == "step 1/100"
    assert lines[-1] == "step 10/100, 2 steps/s, 0:00:45 left, save of step 5: writing"
    progress.clear()
    assert out.getvalue().endswith("\r\x1b[K")
    progress.update(11, None, force=True)
    progress.close()
    assert out.getvalue().endswith("\n")


def test_slow_steps_are_seconds_a_step_and_quick_ones_are_not_all_shown():
    out, clock = Terminal(), Clock()
    progress = Progress(stream=out, now=clock)
    progress.update(1)
    clock.now = 4.0
    progress.update(2)
    assert out.getvalue().endswith("step 2, 4 s/step")
    before = out.getvalue()
    for step in range(3, 50):
        clock.now += 0.001
        progress.update(step)
    assert out.getvalue() == before


def test_nothing_is_shown_where_there_is_no_terminal_or_it_is_gone():
    out = io.StringIO()
    progress = Progress(stream=out)
    progress.update(1)
    progress.clear()
    progress.close()
    assert (progress.shown, out.getvalue()) == (False, "")
    gone = Terminal()
    progress = Progress(stream=gone)
    gone.close()
    progress.update(1, force=True)
    assert not progress.shown
