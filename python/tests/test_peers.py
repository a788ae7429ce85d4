# SPDX-License-Identifier: Apache-2.0
"""Others read what Python wrote, without lastgood."""

import json
import logging

import lastgood
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lastgood import dtypes
from safetensors.torch import load_file
from test_roundtrip import TORCH, raw, torch_noise
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader


@pytest.fixture(autouse=True)
def _quiet():
    """PyTorch's reader warns of single processes."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# What PyTorch's reader knows.
KNOWN = sorted(set(TORCH) - {"F8_E8M0", "F4"})


def test_plain_torch_loads_every_dtype_and_stride_that_python_wrote(root):
    state = {f"model.{d}": torch_noise(d, (6, 5)) for d in KNOWN}
    state["model.transposed"] = torch.randn(7, 3).t()
    state["model.empty"] = torch.empty(0, 3)
    info = lastgood.save(root, state)
    got = {n: torch.full_like(t, 1) for n, t in state.items()}
    dcp.load(got, storage_reader=HuggingFaceStorageReader(str(root / info.folder)))
    assert all(raw(got[n]) == raw(t) for n, t in state.items())


def test_plain_torch_loads_a_module_and_its_optimizer_that_ranks_wrote(root):
    from test_sessions import all_good, on_ranks

    w = torch.randn(10, 6)

    def save(comm):
        layout = lastgood.Layout([3], [lastgood.Split(0)])
        with lastgood.Session(root, comm) as session, session.save(1) as s:
            part = w.chunk(3)[comm.rank]
            s.tensor("w", part, shape=(10, 6), layout=layout)
            s.tensor("optim.w.exp_avg", part * 2, shape=(10, 6), layout=layout, group="optim")
        return s.info.folder

    folder = all_good(on_ranks(3, save))[0]
    got = {"w": torch.zeros(10, 6), "optim.w.exp_avg": torch.zeros(10, 6)}
    dcp.load(got, storage_reader=HuggingFaceStorageReader(str(root / folder)))
    assert torch.equal(got["w"], w)
    assert torch.equal(got["optim.w.exp_avg"], w * 2)


def test_the_safetensors_package_opens_the_shard(root):
    state = {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5)}
    info = lastgood.save(root, state, attach={"config.json": b'{"model_type": "x"}'})
    got = load_file(root / info.folder / "shard-00001-model-00001-of-00001.safetensors")
    assert all(torch.equal(got[n], t) for n, t in state.items())
    assert json.loads((root / info.folder / "config.json").read_text()) == {"model_type": "x"}


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F4"])
def test_dtypes_that_torch_s_reader_does_not_know_do_not_hide_the_others(dtype, root):
    assert dtype in dtypes.NAMES
    info = lastgood.save(root, {"odd": torch_noise(dtype, (4, 4)), "w": torch.ones(2)})
    got = {"w": torch.zeros(2)}
    dcp.load(got, storage_reader=HuggingFaceStorageReader(str(root / info.folder)))
    assert torch.equal(got["w"], torch.ones(2))
    assert raw(lastgood.load(root, framework="torch")["odd"]) == raw(torch_noise(dtype, (4, 4)))
