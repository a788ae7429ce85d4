# SPDX-License-Identifier: Apache-2.0
"""Warm starts: into existing models, from checkpoints and files."""

import lastgood
import ml_dtypes
import numpy as np
import pytest
import torch


def model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).to(dtype)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_module_loads_into_another_s_memory(root):
    a, b = model(seed=1), model(seed=2)
    lastgood.save(root, a)
    where = [t.data_ptr() for t in b.state_dict().values()]
    result = lastgood.load_into(b, root)
    assert equal(a, b)
    assert [t.data_ptr() for t in b.state_dict().values()] == where
    assert set(result.loaded) == set(a.state_dict())
    assert (result.cast, result.missing, result.unused, result.mismatched) == ((), (), (), ())


def test_strict_changes_nothing_when_names_or_forms_differ(root):
    a = model(seed=1)
    state = dict(a.state_dict())
    del state["0.bias"]
    state["extra"] = torch.ones(1)
    lastgood.save(root, state)
    b = model(seed=2)
    before = {n: t.clone() for n, t in b.state_dict().items()}
    with pytest.raises(lastgood.MissingError, match=r'lacks "0\.bias"; the model has no "extra"'):
        lastgood.load_into(b, root)
    assert all(torch.equal(t, before[n]) for n, t in b.state_dict().items())
    result = lastgood.load_into(b, root, strict=False)
    assert (result.missing, result.unused) == (("0.bias",), ("extra",))
    assert torch.equal(b[0].weight, a[0].weight)
    assert torch.equal(b[0].bias, before["0.bias"])


def test_other_shapes_are_reported_or_refused(root):
    lastgood.save(root, torch.nn.Linear(4, 5))
    b = torch.nn.Linear(4, 3)
    with pytest.raises(
        lastgood.MismatchError, match=r'"weight": the model has F32 \[3, 4\], the source F32 \[5, 4\] \(1 more'
    ):
        lastgood.load_into(b, root)
    result = lastgood.load_into(b, root, strict=False)
    assert [m.name for m in result.mismatched] == ["weight", "bias"]
    assert result.mismatched[0] == lastgood.Mismatch("weight", "F32 [3, 4]", "F32 [5, 4]")


@pytest.mark.parametrize(
    "rename",
    [lambda n: n.removeprefix("module."), {f"module.{n}": n for n in model().state_dict()}],
)
def test_names_can_be_changed(root, rename):
    a, b = model(seed=1), model(seed=2)
    lastgood.save(root, {f"module.{n}": t for n, t in a.state_dict().items()})
    with pytest.raises(lastgood.MissingError):
        lastgood.load_into(b, root)
    lastgood.load_into(b, root, rename=rename)
    assert equal(a, b)


@pytest.mark.parametrize(("model", "rename", "word"), [(3, None, "model is a int"), ({}, 3, "rename is 3")])
def test_arguments_that_mean_nothing_are_refused_by_name(root, model, rename, word):
    lastgood.save(root, {"w": torch.ones(2)})
    with pytest.raises(lastgood.InvalidError, match=word):
        lastgood.load_into(model, root, rename=rename)


def test_none_drops_a_name_and_two_of_one_name_are_an_error(root):
    lastgood.save(root, {"head": torch.ones(3), "body": torch.ones(2)})
    b = {"body": torch.zeros(2)}
    result = lastgood.load_into(b, root, rename=lambda n: None if n == "head" else n)
    assert (result.loaded, result.unused) == (("body",), ("head",))
    with pytest.raises(lastgood.InvalidError, match='"x" of both'):
        lastgood.load_into(b, root, rename=lambda n: "x")


@pytest.mark.parametrize("cast", [False, True])
def test_dtypes_are_converted_only_when_asked_for(root, cast):
    a, b = model(torch.bfloat16, 1), model(torch.float32, 2)
    lastgood.save(root, a)
    if not cast:
        with pytest.raises(lastgood.MismatchError, match=r"F32.*BF16"):
            lastgood.load_into(b, root)
        return
    result = lastgood.load_into(b, root, cast=True)
    assert equal(a.float(), b)
    assert "0.weight" in result.cast
    assert "1.num_batches_tracked" not in result.cast


def test_conversion_in_blocks_equals_conversion_at_once(root):
    a = torch.randn(3000, 4096)  # 48 MB
    lastgood.save(root, {"a": a})
    b = torch.zeros(4096, 3000, dtype=torch.bfloat16).t()
    lastgood.load_into({"a": b}, root, cast=True)
    assert torch.equal(b, a.bfloat16())
    c = np.zeros((3000, 4096), np.float16)
    lastgood.load_into({"a": c}, root, cast=True)
    assert np.array_equal(c, a.numpy().astype(np.float16))


@pytest.mark.parametrize(
    ("stored", "wanted", "allowed"),
    [("F32", "BF16", True), ("F8_E4M3", "F64", True), ("I32", "I64", True), ("U8", "I16", True), ("U32", "U64", True),
     ("I64", "I32", False), ("I32", "U64", False), ("U8", "I8", False), ("F32", "I32", False), ("I32", "F64", False),
     ("F32", "C64", False), ("BOOL", "U8", False)],
)  # fmt: skip
def test_only_conversions_that_keep_the_kind_of_number_are_made(stored, wanted, allowed):
    from lastgood import dtypes

    assert dtypes.converts(dtypes.NUMBERS[stored], dtypes.NUMBERS[wanted]) is allowed


def test_numpy_arrays_are_read_into_and_converted_too(root):
    lastgood.save(root, {"w": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), "n": np.arange(3, dtype=np.uint8)})
    tree = {"w": np.zeros((3, 2), np.float32).T, "n": np.zeros(3, np.int64)}
    result = lastgood.load_into(tree, root, cast=True)
    assert set(result.cast) == {"w", "n"}
    assert np.array_equal(tree["w"], np.arange(6).reshape(2, 3))
    assert np.array_equal(tree["n"], np.arange(3))


def test_weights_of_a_safetensors_file_load_whatever_the_memory_looks_like(tmp_path):
    from safetensors.torch import save_file

    save_file(
        {"w": torch.arange(12.0).reshape(3, 4), "h": torch.ones(2, dtype=torch.float16)}, tmp_path / "m.safetensors"
    )
    tree = {"w": torch.zeros(4, 3).t(), "h": torch.zeros(2)}
    result = lastgood.load_into(tree, tmp_path / "m.safetensors", cast=True)
    assert result.cast == ("h",)
    assert torch.equal(tree["w"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(tree["h"], torch.ones(2))


def tied():
    m = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    m[1].weight = m[0].weight
    return m


def test_k11_a_tied_name_that_the_source_lacks_is_not_missing(root):
    w = torch.randn(5, 3)
    lastgood.save(root, {"0.weight": w})
    m = tied()
    assert lastgood.load_into(m, root).missing == ()
    assert torch.equal(m[1].weight, w)


def test_k11_tied_weights_that_differ_in_the_source_are_an_error_not_a_choice(root):
    w = torch.randn(5, 3)
    lastgood.save(root, {"0.weight": w, "1.weight": w.clone()})
    m = tied()
    lastgood.load_into(m, root)
    assert torch.equal(m[1].weight, w)
    lastgood.save(root, {"0.weight": w, "1.weight": w + 1}, step=1)
    with pytest.raises(lastgood.MismatchError, match="ties"):
        lastgood.load_into(tied(), root)


def test_k11_two_empty_tensors_are_no_tie(root):
    lastgood.save(root, {"a": torch.empty(0), "b": torch.empty(0), "c": torch.ones(1)})
    tree = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.zeros(1)}
    assert set(lastgood.load_into(tree, root).loaded) == {"a", "b", "c"}


def test_optimizer_tensors_of_a_run_are_no_leftovers_of_a_model(root):
    a = torch.nn.Linear(2, 2)
    with lastgood.Session(root) as session, session.save(1) as save:
        save.tensors(a.state_dict())
        save.tensors({"optim.weight": torch.ones(2)}, group="optim")
    b = torch.nn.Linear(2, 2)
    assert lastgood.load_into(b, root).unused == ("optim.weight",)
    assert equal(a, b)


def test_damage_is_an_error(root):
    lastgood.save(root, model())
    (shard,) = root.glob("step-*/shard-*-model-*")
    with open(shard, "r+b") as f:
        f.seek(-1, 2)
        f.write(b"\x99")
    with pytest.raises(lastgood.CorruptError):
        lastgood.load_into(model(), root)
