# SPDX-License-Identifier: Apache-2.0
"""The safetensors package reads our shards, file by file."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

NUMPY = {"BOOL": "bool", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4"}
NUMPY |= {"F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8"}


def shards(checkpoint):
    return {name: keys for name, keys in checkpoint.files().items() if name.endswith(".safetensors")}


def test_the_folder_holds_the_files_that_the_manifest_gives_it_and_no_other_safetensors(checkpoint):
    there = {p.name for p in checkpoint.folder.iterdir() if p.name.endswith((".safetensors", ".state"))}
    assert there == set(checkpoint.files())
    assert len(there) > 12


def test_each_shard_has_the_keys_shapes_and_offsets_that_the_manifest_says(checkpoint):
    seen = 0
    for file, keys in shards(checkpoint).items():
        with safe_open(checkpoint.folder / file, framework="pt") as f:
            metadata = f.metadata()
            assert metadata["format"] == "pt"
            offsets = json.loads(metadata["DCP_SHARDING_INFO"])
            assert set(f.keys()) == set(keys) == set(offsets), file
            for key, (tensor, offset, size) in keys.items():
                info = f.get_slice(key)
                assert tuple(info.get_shape()) == size, (file, key)
                assert info.get_dtype() == tensor.dtype, (file, key)
                assert tuple(offsets[key]["saved_offsets"]) == offset, (file, key)
                seen += 1
    assert seen > 100


def test_every_byte_of_every_shard_is_the_one_that_was_saved(checkpoint):
    import torch

    for file, keys in shards(checkpoint).items():
        loaded = load_file(checkpoint.folder / file)
        for key, (tensor, offset, size) in keys.items():
            got = loaded[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert got == tensor.box(offset, size), (file, key)


def test_numpy_reads_the_dtypes_that_it_knows(checkpoint):
    seen = set()
    for file, keys in shards(checkpoint).items():
        with safe_open(checkpoint.folder / file, framework="numpy") as f:
            for key, (tensor, offset, size) in keys.items():
                if tensor.dtype in NUMPY:
                    array = f.get_tensor(key)
                    assert array.dtype == np.dtype(NUMPY[tensor.dtype]), (file, key)
                    assert array.tobytes() == tensor.box(offset, size), (file, key)
                    seen.add(tensor.dtype)
    assert seen == set(NUMPY)


def test_data_begins_at_a_page_and_files_end_with_it(checkpoint):
    for file in checkpoint.files():
        raw = (checkpoint.folder / file).read_bytes()
        n = int.from_bytes(raw[:8], "little")
        assert (8 + n) % 4096 == 0, file
        header = json.loads(raw[8 : 8 + n])
        header.pop("__metadata__")
        assert 8 + n + max(t["data_offsets"][1] for t in header.values()) == len(raw), file


def test_raw_files_are_of_the_same_format_under_another_extension(checkpoint):
    for file, keys in checkpoint.files().items():
        if not file.endswith(".state"):
            continue
        with safe_open(checkpoint.folder / file, framework="numpy") as f:
            assert set(f.keys()) == set(keys) | {"b:loader"}
            rank = int(file.split("-")[1]) - 1
            assert f.get_tensor("b:loader").tobytes() == f"state of rank {rank}".encode()
        raw = (checkpoint.folder / file).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        for key, (tensor, offset, size) in keys.items():
            begin, end = header[key]["data_offsets"]
            assert header[key]["dtype"] == tensor.dtype
            assert raw[start + begin : start + end] == tensor.box(offset, size), (file, key)


def test_the_manifest_is_json_that_keeps_large_integers(checkpoint):
    state = checkpoint.manifest["state"]
    assert state == {"samples": {"$int": "9007199254740993"}, "lr": 0.001, "schedule": "cosine"}
    assert checkpoint.manifest["step"] == 12
    assert [t["name"] for t in checkpoint.manifest["tensors"]] == sorted(checkpoint.tensors, key=str.encode)


@pytest.mark.parametrize("cut", [1, 100])
def test_a_shard_that_was_cut_short_is_refused_by_other_readers_too(checkpoint, tmp_path, cut):
    file = next(iter(shards(checkpoint)))
    (tmp_path / file).write_bytes((checkpoint.folder / file).read_bytes()[:-cut])
    with pytest.raises(Exception, match="not fully covered|incomplete"):
        safe_open(tmp_path / file, framework="pt")
