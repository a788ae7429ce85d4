# SPDX-License-Identifier: Apache-2.0
"""What is saved comes back with all its bits: dtypes, strides, trees."""

import collections
import math
import threading

import lastgood
import ml_dtypes
import numpy as np
import pytest
from frameworks import MISSING, need, torch
from hypothesis import given
from hypothesis import strategies as st
from lastgood import arrays, dtypes

NUMPY = {dtypes.NAMES[n]: d for n, d in dtypes.numpy_dtypes().items()}
TORCH = {} if "torch" in MISSING else {dtypes.NAMES[n]: d for n, d in dtypes.torch_dtypes().items()}
PACKED = ["F4", "F6_E2M3", "F6_E3M2"]


def test_k12_every_dtype_of_the_format_has_arrays_in_numpy_or_torch_or_is_packed():
    assert set(NUMPY) | set(PACKED) == set(dtypes.NAMES)
    assert "torch" in MISSING or set(TORCH) == set(dtypes.NAMES) - {"F6_E2M3", "F6_E3M2"}


def raw(array):
    """The bytes of an array of any framework, row-major."""
    if isinstance(array, arrays.RawArray):
        return bytes(array.data)
    if "torch" not in MISSING and isinstance(array, torch.Tensor):
        return bytes(array.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy())
    return np.ascontiguousarray(array).tobytes()


def noise(dtype, shape, seed=0):
    """An array of a dtype whose bytes are arbitrary, NaNs and all; bools are 0 or 1."""
    n = dtypes.BITS[dtypes.NUMBERS[dtype]] // 8 * math.prod(shape)
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, n, dtype=np.uint8)
    return data.view(NUMPY[dtype]).reshape(shape)


def torch_noise(dtype, shape, seed=0):
    need("torch")
    data = noise("BOOL" if dtype == "BOOL" else "U8", (math.prod(shape) * TORCH[dtype].itemsize,), seed)
    return (
        torch.frombuffer(bytearray(data.tobytes()), dtype=TORCH[dtype]).reshape(shape)
        if data.size
        else torch.empty(shape, dtype=TORCH[dtype])
    )


# ------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (0, 3), (7, 5), (3, 1, 2, 5)])
def test_k12_numpy_arrays_of_every_dtype_and_of_no_elements_come_back(dtype, shape, root):
    a = noise(dtype, shape)
    lastgood.save(root, {"a": a})
    b = lastgood.load(root)["a"]
    assert (b.dtype, b.shape, raw(b)) == (a.dtype, a.shape, raw(a))
    into = np.zeros_like(a)
    lastgood.open(root)["a"].into(into)
    assert raw(into) == raw(a)
    assert raw(lastgood.open(root)["a"].map()) == raw(a)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [(1,), (0,), (2, 0), (0, 3), (7, 6), (3, 1, 2, 4)])
def test_k12_torch_tensors_of_every_dtype_and_of_no_elements_come_back(dtype, shape, root):
    a = torch_noise(dtype, shape)
    lastgood.save(root, {"a": a})
    b = lastgood.load(root, framework="torch")["a"]
    assert (b.dtype, b.shape, raw(b)) == (a.dtype, a.shape, raw(a))
    into = torch.empty_like(a)
    lastgood.open(root)["a"].into(into)
    assert raw(into) == raw(a)
    assert lastgood.open(root)["a"].dtype == dtype


@pytest.mark.parametrize("dtype", PACKED)
def test_k12_dtypes_below_a_byte_keep_their_logical_shape(dtype, root):
    data = bytes(range(12))
    shape = (2, 12 * 8 // dtypes.BITS[dtypes.NUMBERS[dtype]] // 2)
    lastgood.save(root, {"a": arrays.RawArray(dtype, shape, data)})
    stored = lastgood.open(root)["a"]
    assert (stored.dtype, stored.shape, stored.nbytes) == (dtype, shape, 12)
    b = lastgood.load(root)["a"]
    assert (b.dtype, b.shape, raw(b)) == (dtype, shape, data)
    into = arrays.RawArray(dtype, shape, bytearray(12))
    stored.into(into)
    assert raw(into) == data
    row = stored[1]
    assert (row.shape, raw(row)) == (shape[1:], data[6:])


def test_k12_torch_counts_two_f4_elements_as_one(root):
    a = torch_noise("F4", (2, 4))
    lastgood.save(root, {"a": a})
    assert lastgood.open(root)["a"].shape == (2, 8)
    assert raw(lastgood.open(root, framework="torch")["a"][1]) == raw(a[1])
    assert lastgood.open(root, framework="torch")["a"][1].shape == (4,)


def test_k12_without_ml_dtypes_integers_stand_for_what_numpy_lacks_and_say_so(root, monkeypatch):
    a = noise("BF16", (3, 4))
    lastgood.save(root, {"a": a, "b": noise("F8_E5M2", (5,))})
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    for cached in (dtypes.numpy_dtypes, dtypes._from_numpy):
        cached.cache_clear()
    try:
        got = lastgood.load(root)
        assert got["a"].dtype == np.uint16
        assert got["a"].dtype.metadata["lastgood"] == "BF16"
        assert got["b"].dtype.metadata["lastgood"] == "F8_E5M2"
        lastgood.save(root, got, step=1)
        with pytest.raises(lastgood.UnsupportedError, match="ml_dtypes"):
            lastgood.load_into({"a": np.zeros((3, 4), np.float32)}, root, strict=False, cast=True)
    finally:
        for cached in (dtypes.numpy_dtypes, dtypes._from_numpy):
            cached.cache_clear()
    monkeypatch.undo()
    again = lastgood.load(root)
    assert again["a"].dtype == ml_dtypes.bfloat16
    assert raw(again["a"]) == raw(a)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(2, ">u4"), "big-endian.*<u4"),
        (np.zeros(2, np.complex128), "complex128"),
        (np.zeros(2, np.longdouble), "no dtype for NumPy"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.zeros(2, [("x", "f4")]), "no dtype for NumPy"),
        (np.array([None, 1]), "object"),
        (np.array(["a"]), "<U1"),
        (np.ma.array([1, 2], mask=[0, 1]), "masked"),
        (np.zeros(3, ml_dtypes.int4), "int4"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "complex128"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
    ],
)
def test_k12_what_has_no_form_is_refused_by_name_before_anything_is_written(array, words, root):
    array = array() if callable(array) else array
    with pytest.raises(lastgood.UnsupportedError, match=f'"deep.x".*{words}'):
        lastgood.save(root, {"deep": {"x": array}})
    assert not root.exists() or lastgood.entries(root) == []


def test_k12_big_endian_memory_is_not_read_into(root):
    lastgood.save(root, {"a": np.arange(6, dtype="<u4")})
    with pytest.raises(lastgood.UnsupportedError, match="big-endian"):
        lastgood.open(root)["a"].into(np.zeros(6, ">u4"))


# ------------------------------------------------------------------ strides


@st.composite
def views(draw):
    """An index expression that makes a view of strange strides, and a shape."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
    return shape, tuple(order), tuple(slice(None, None, s) for s in steps)


@given(views(), st.sampled_from(sorted(NUMPY)), st.integers(0, 2**32 - 1))
def test_k12_numpy_views_of_any_strides_are_saved_and_read_into(view, dtype, seed):
    shape, order, index = view
    whole = noise(dtype, shape, seed)
    a = whole.transpose(order)[index]
    with lastgood_memory() as root:
        lastgood.save(root, {"a": a})
        b = lastgood.load(root)["a"]
        assert (b.shape, raw(b)) == (a.shape, raw(a))
        other = noise(dtype, shape, seed + 1)
        before = other.copy()
        into = other.transpose(order)[index]
        lastgood.open(root)["a"].into(into)
        assert raw(into) == raw(a)
        before.transpose(order)[index] = into  # and nothing around it has changed
        assert raw(before) == raw(other)


@given(views(), st.sampled_from(sorted(set(TORCH) - {"F4"}) or [None]), st.integers(0, 2**31))
def test_k12_torch_views_of_any_strides_are_saved_and_read_into(view, dtype, seed):
    shape, order, index = view
    index = tuple(slice(None, None, abs(s.step)) for s in index)
    a = torch_noise(dtype, shape, seed).permute(order)[index]
    with lastgood_memory() as root:
        lastgood.save(root, {"a": a})
        assert raw(lastgood.load(root, framework="torch")["a"]) == raw(a)
        into = torch_noise(dtype, shape, seed + 1).permute(order)[index]
        lastgood.open(root)["a"].into(into)
        assert raw(into) == raw(a)


class lastgood_memory:
    """A root in memory, gone afterwards."""

    lock = threading.Lock()
    count = 0

    def __enter__(self):
        with self.lock:
            lastgood_memory.count += 1
            self.name = f"test-{lastgood_memory.count}"
        return f"mem:{self.name}"

    def __exit__(self, *_):
        from lastgood._core import ffi, lib

        lib.lg_memory_store_drop(ffi.new("char[]", self.name.encode()))


def test_k12_expanded_channels_last_and_conjugate_tensors_are_saved_as_their_values(root):
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    tree = {
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "part": torch.arange(24).reshape(2, 3, 4)[:, 1, ::2],
    }
    lastgood.save(root, tree)
    got = lastgood.load(root, framework="torch")
    for name, value in tree.items():
        assert torch.equal(got[name], value.resolve_conj().resolve_neg()), name


@pytest.mark.parametrize(
    "target",
    [
        np.broadcast_to(np.zeros((1, 4), np.float32), (3, 4)),
        lambda: torch.zeros(1, 4).expand(3, 4),
        np.lib.stride_tricks.as_strided(np.zeros(12, np.float32), (3, 4), (4, 4), writeable=True),
    ],
)
def test_memory_whose_elements_are_shared_or_read_only_is_not_read_into(target, root):
    lastgood.save(root, {"a": np.ones((3, 4), np.float32)})
    with pytest.raises(lastgood.InvalidError, match=r"share memory|read-only"):
        lastgood.open(root)["a"].into(target() if callable(target) else target)


def test_arrays_of_another_dtype_or_shape_or_with_no_memory_are_not_read_into(root):
    lastgood.save(root, {"a": np.ones((3, 4), np.float32)})
    stored = lastgood.open(root)["a"]
    with pytest.raises(lastgood.MismatchError, match=r"\[4, 3\]"):
        stored.into(np.zeros((4, 3), np.float32))
    with pytest.raises(lastgood.MismatchError, match=r"F64.*F32"):
        stored.into(np.zeros((3, 4)))
    with pytest.raises(lastgood.InvalidError, match="no array"):
        stored.into([1, 2])
    with pytest.raises(lastgood.UnsupportedError, match="meta"):
        stored.into(torch.zeros(3, 4, device="meta"))


def test_autograd_learns_that_memory_was_read_into(root):
    lastgood.save(root, {"a": torch.ones(3)})
    w = torch.zeros(3, requires_grad=True)
    loss = (w * w).sum()
    lastgood.open(root)["a"].into(w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -------------------------------------------------------------------- trees

leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(lambda n, s: np.full(s, n, np.float32), st.integers(0, 99), st.sampled_from([(), (2,), (2, 3)])),
)
keys = st.one_of(st.text("abc", min_size=1, max_size=4), st.integers(0, 99))
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.lists(st.tuples(keys, inner), max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(collections.deque),
    ),
    max_leaves=12,
)


def equal(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b and math.copysign(1, a) == math.copysign(1, b) if isinstance(a, float) else a == b


@given(st.dictionaries(keys, trees, max_size=4))
def test_nested_trees_come_back_as_they_were(tree):
    with lastgood_memory() as root:
        try:
            lastgood.save(root, tree)
        except lastgood.ConflictError:  # 1 and "1" on one level
            return
        got = lastgood.load(root)
        if all(isinstance(v, np.ndarray) and isinstance(k, str) for k, v in tree.items()):
            assert equal(dict(sorted(tree.items())), dict(sorted(got.items())))
        else:
            assert equal(tree, got)
        assert equal(lastgood.load(root, like=tree), tree)


def test_names_that_two_arrays_would_have_are_an_error(root):
    with pytest.raises(lastgood.ConflictError, match=r'"a\.b"'):
        lastgood.save(root, {"a.b": np.ones(1), "a": {"b": np.ones(2)}})


@pytest.mark.parametrize("tree", [np.ones(3), 5, "x", {1, 2}])
def test_what_is_no_tree_is_refused(tree, root):
    with pytest.raises(lastgood.InvalidError, match="a tree is"):
        lastgood.save(root, tree)


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\ud800", "__metadata__", "x" * 5000, ""])
def test_names_that_a_checkpoint_cannot_have_are_refused(name, root):
    with pytest.raises((lastgood.InvalidError, lastgood.LimitError)):
        lastgood.save(root, {name: np.ones(1)})
    assert lastgood.entries(root) == [] if root.exists() else True


def test_named_tuples_come_back_by_a_tree_that_is_like(root):
    State = collections.namedtuple("State", ["count", "mu"])
    tree = {"opt": (State(np.int32(3), {"w": np.ones(2)}), State(np.array(4), {"w": np.zeros(3)}))}
    lastgood.save(root, tree)
    got = lastgood.load(root, like=tree)
    assert type(got["opt"][1]) is State
    assert got["opt"][1].count == 4
    assert raw(got["opt"][0].mu["w"]) == raw(np.ones(2))
    assert type(lastgood.load(root)["opt"][0]) is tuple


def test_a_tree_that_is_like_must_have_the_stored_forms(root):
    lastgood.save(root, {"a": np.ones(3)})
    with pytest.raises(lastgood.MismatchError, match=r"F32 \[3\].*F64 \[3\]"):
        lastgood.load(root, like={"a": np.ones(3, np.float32)})
    with pytest.raises(lastgood.MissingError, match='"b"'):
        lastgood.load(root, like={"b": np.ones(3)})


# ---------------------------------------------------------------------- ties


def test_k11_one_object_under_two_names_is_a_tie_and_equal_memory_is_none(root):
    w = np.arange(4.0)
    empty = [np.empty(0), np.empty(0)]
    lastgood.save(root, {"a": w, "b": w, "c": w[:], "e": empty})
    c = lastgood.open(root)
    assert {n: t.alias_of for n, t in c.items()} == {"a": None, "b": "a", "c": None, "e.0": None, "e.1": None}
    tree = lastgood.load(root)
    assert all(raw(tree[n]) == raw(w) for n in "abc")


def test_k11_a_module_with_tied_weights_comes_back(root):
    def make():
        m = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        m[1].weight = m[0].weight
        return m

    m, n = make(), make()
    lastgood.save(root, m)
    assert lastgood.load_into(n, root).missing == ()
    assert torch.equal(m[0].weight, n[0].weight)
    assert n[0].weight is n[1].weight


# ----------------------------------------------------------------------- JAX

jax = pytest.importorskip("jax")


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn", "float16"]
)
def test_jax_arrays_come_back(dtype, root):
    a = jax.numpy.arange(12).reshape(3, 4).astype(dtype)
    lastgood.save(root, {"a": a, "t": a.T})
    got = lastgood.load(root, framework="jax")
    assert isinstance(got["a"], jax.Array)
    assert (got["a"].dtype, raw(got["a"]), raw(got["t"])) == (a.dtype, raw(a), raw(a.T))
    like = lastgood.load(root, like={"a": a})["a"]
    assert (type(like), raw(like)) == (type(a), raw(a))
    assert raw(lastgood.load(root)["a"]) == raw(a)


def test_jax_never_loses_bits_to_its_32_bit_default(root):
    lastgood.save(root, {"a": np.arange(3.0)})
    with pytest.raises(lastgood.UnsupportedError, match="jax_enable_x64"):
        lastgood.load(root, framework="jax")


def test_jax_arrays_are_not_read_into_and_random_keys_are_refused(root):
    lastgood.save(root, {"a": jax.numpy.ones(3)})
    with pytest.raises(lastgood.UnsupportedError, match="never change"):
        lastgood.open(root)["a"].into(jax.numpy.ones(3))
    with pytest.raises(lastgood.UnsupportedError, match="key_data"):
        lastgood.save(root, {"a": jax.random.key(0)})
