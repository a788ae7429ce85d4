# SPDX-License-Identifier: Apache-2.0
"""Values as tagged JSON, by themselves and through a checkpoint."""

import collections
import enum
import math
import os
import pickle
import struct
import subprocess
import sys

import lastgood
import numpy as np
import pytest
from frameworks import MISSING, torch
from hypothesis import given
from hypothesis import strategies as st
from lastgood import tagged

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**2000), 2**2000),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
    st.sampled_from(
        [np.float32(0.1), np.int64(2**62), np.uint8(7), np.bool_(True), np.float16("nan"), np.complex64(1j)]
    ),
    st.nothing()
    if "torch" in MISSING
    else st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda:3"), torch.device("cpu")]),
)
hashable = st.recursive(
    scalars, lambda k: st.one_of(st.lists(k, max_size=3).map(tuple), st.frozensets(k, max_size=3)), max_leaves=5
)
values = st.recursive(
    st.one_of(scalars, st.sets(hashable, max_size=4), hashable),
    lambda v: st.one_of(
        st.lists(v, max_size=4),
        st.lists(v, max_size=4).map(tuple),
        st.dictionaries(hashable, v, max_size=4),
        st.dictionaries(st.text("ab$", max_size=3), v, max_size=4),
        st.lists(st.tuples(hashable, v), max_size=3).map(collections.OrderedDict),
        st.builds(collections.deque, st.lists(v, max_size=3), st.sampled_from([None, 5, 3])),
        st.builds(
            collections.defaultdict, st.sampled_from([int, list, None, str]), st.dictionaries(hashable, v, max_size=3)
        ),
    ),
    max_leaves=15,
)


def same(a, b):
    """Equal in type and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, collections.deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, dict):
        if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
            return False
        return len(a) == len(b) and all(map(same, a.keys(), b.keys())) and all(map(same, a.values(), b.values()))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and sorted(map(tagged.encode, a)) == sorted(map(tagged.encode, b))
    return a == b


@given(values)
def test_k22_every_value_comes_back_with_its_type_and_all_its_bits(value):
    assert same(tagged.decode(tagged.encode(value)), value)


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=3), values, max_size=4))
def test_k22_every_value_comes_back_from_a_checkpoint(state):
    with lastgood.Session("mem:tagged", new_run=True) as session:
        with session.save(1) as save:
            for key, value in state.items():
                save.state(key, value)
                save.rank_state(key, value)
        checkpoint = lastgood.open(f"mem:tagged@g{save.info.generation}")
        assert set(checkpoint.state) == set(state)
        assert len(checkpoint.state) == len(state)
        for key, value in state.items():
            assert same(checkpoint.state[key], value), key
            assert same(checkpoint.rank_state(key, 0, 1), value), key


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000001, 0xFFF0000000000000]
)
def test_k22_nan_payloads_and_infinities_keep_their_bits(bits):
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    assert struct.pack("<d", tagged.decode(tagged.encode(value))) == struct.pack("<Q", bits)


@pytest.mark.parametrize(
    "value",
    [-0.0, 0.0, 5e-324, 1e308, 0.1, 1e22, 1.0, 2**53 + 1, -(2**53) - 1, pytest.param(10**5000, id="huge"), True, 1],
)
def test_k22_numbers_keep_their_kind_and_bits(value):
    got = tagged.decode(tagged.encode(value))
    assert type(got) is type(value)
    assert got == value
    if isinstance(value, float):
        assert math.copysign(1, got) == math.copysign(1, value)


def test_k22_a_counter_keeps_zero_and_negative_counts():
    value = collections.Counter({"a": 0, "b": -3, ("c", 1): 2**60, "d": 0.5})
    assert same(tagged.decode(tagged.encode(value)), value)


def test_equal_sets_have_the_same_text_in_every_process():
    code = "from lastgood import tagged; print(tagged.encode({'alpha', 'beta', 'gamma', 1, (2, 'x'), frozenset('uvwxyz')}))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=dict(os.environ, PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(texts) == 1


class Color(enum.IntEnum):
    RED = 1


class Odd:
    def __reduce__(self):
        raise AssertionError("was pickled")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, Odd()]}, r"state\['a'\]\[1\]: .*Odd"),
        ({"a": {1: Color.RED}}, r"state\['a'\]\[1\]: .*Color"),
        ({"f": print}, r"state\['f'\]"),
        ({"s": "\ud800"}, r"state\['s'\]: .*lone surrogate"),
        ({(1, Odd()): 2}, "key"),
        (np.longdouble(1), "longdouble|float128"),
        (collections.defaultdict(Odd), "defaultdict"),
        (np.str_("x"), "<U1"),
        (slice(3), "slice"),
        (bytearray(b"x"), "bytearray"),
    ],
)
def test_k15_what_has_no_form_is_refused_with_the_path_and_never_pickled(value, path):
    with pytest.raises(lastgood.UnsupportedError, match=path):
        tagged.encode(value, "state")


def test_values_that_hold_themselves_are_refused():
    value = []
    value.append(value)
    with pytest.raises(lastgood.UnsupportedError, match="nest"):
        tagged.encode(value)


@pytest.mark.parametrize(
    "text",
    ['{"$unknown": 1}', '{"$tuple": 5}', '{"$numpy": {"dtype": "O", "hex": "00"}}', '{"a": 1, "a": 2}', '{"$defaultdict": {"factory": "eval", "items": []}}',
     '{"$bytes": 5}', "NaN", '{"$dtype": 7}', '{"$set": [[1]]}'],
)  # fmt: skip
def test_k15_hostile_text_is_an_error(text):
    with pytest.raises(lastgood.FormatError):
        tagged.decode(text)


@pytest.mark.parametrize(
    "text",
    ['{"$dtype": 7}', '{"$device": {}}', '{"$numpy": 1}', '{"$numpy": {"dtype": 4, "hex": "00"}}', '{"$numpy": {"dtype": "<f4", "hex": "x"}}',
     '{"$numpy": {"dtype": "<f4"}}'],
)  # fmt: skip
@pytest.mark.parametrize("missing", [(), ("numpy", "torch")])
def test_k15_a_tag_with_the_wrong_content_is_an_error_with_and_without_the_package_that_it_is_of(
    text, missing, monkeypatch
):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(lastgood.FormatError):
        tagged.decode(text)


def test_k15_no_tag_imports_or_calls_what_it_names():
    for name in ("torch.load", "torch.hub", "torch.nn"):
        assert tagged.decode(f'{{"$dtype": "{name}"}}') == tagged.Foreign("$dtype", name)


def test_k15_a_pickle_in_the_place_of_state_is_refused_unread(root):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    with lastgood.Session(root) as session, session.save(1) as save:
        save.rank_bytes("rng", pickle.dumps(Bomb()))
    with pytest.raises(lastgood.FormatError):
        lastgood.open(root).rank_state("rng", 0)


def test_values_of_packages_that_are_missing_are_kept_for_writing_again(monkeypatch):
    text = tagged.encode([np.float32(1.5), torch.bfloat16, torch.device("cuda:1")])
    for name in ("numpy", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    value = tagged.decode(text)
    assert [type(v) for v in value] == [tagged.Foreign] * 3
    assert tagged.encode(value) == text
