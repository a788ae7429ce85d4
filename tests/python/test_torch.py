# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own reader loads and reshards a step folder, without lastgood."""

import json
import logging
import math
import os
import subprocess

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import written
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16}
DTYPES |= {"I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64}
DTYPES |= {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
DTYPES |= {"C64": torch.complex64, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn}
DTYPES |= {"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}
PROCESSES = 2
PLACEMENTS = {"shard 0": Shard(0), "shard 1": Shard(1), "replicate": Replicate()}


def spoiled(shape, dtype):
    """A tensor full of bytes that are in no expected one as a whole, so that
    whatever a load leaves out shows."""
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    fill = b"\x01" if dtype is torch.bool else b"\xaa"
    return torch.frombuffer(bytearray(fill * count), dtype=dtype).reshape(shape)


def raw_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load(folder, state, **options):
    logging.disable(logging.WARNING)  # that there is only one process
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder), **options))


@pytest.mark.parametrize("threads", [1, 3])
def test_all_tensors_load_into_plain_tensors(checkpoint, threads):
    wanted = checkpoint.for_torch()
    state = {name: spoiled(t.shape, DTYPES[t.dtype]) for name, t in wanted.items()}
    load(checkpoint.folder, state, thread_count=threads)
    for name, t in wanted.items():
        assert raw_bytes(state[name]) == t.bytes().tobytes(), name


def test_the_reader_sees_all_tensors_with_their_dtypes_and_no_raw_state(checkpoint):
    metadata = HuggingFaceStorageReader(str(checkpoint.folder)).read_metadata().state_dict_metadata
    assert set(metadata) == set(checkpoint.for_torch())
    for name, t in checkpoint.for_torch().items():
        assert tuple(metadata[name].size) == t.shape, name
        assert metadata[name].properties.dtype == DTYPES[t.dtype], name
    assert {t.dtype for t in checkpoint.for_torch().values()} == set(DTYPES)


def test_boxes_tile_each_tensor_as_torch_sees_them(checkpoint):
    metadata = HuggingFaceStorageReader(str(checkpoint.folder)).read_metadata().state_dict_metadata
    for name, entry in metadata.items():
        chunks = entry.chunks
        assert sum(math.prod(c.sizes) for c in chunks) == math.prod(entry.size), name
        assert len({tuple(c.offsets) for c in chunks}) == len(chunks), name
        assert math.prod(entry.size) == 0 or all(math.prod(c.sizes) > 0 for c in chunks), name


def test_a_nested_state_dict_loads_by_joined_names(checkpoint):
    shape = checkpoint.tensors["optim.m.b"].shape
    state = {"optim": {"m": {"b": spoiled(shape, torch.float32)}}}
    load(checkpoint.folder, state)
    assert raw_bytes(state["optim"]["m"]["b"]) == checkpoint.tensors["optim.m.b"].bytes().tobytes()


# ---------------------------------------------------------- on two processes


def part(whole, placement, rank):
    """What `rank` holds of a tensor."""
    if isinstance(placement, Replicate):
        return whole
    pieces = whole.chunk(PROCESSES, placement.dim)
    empty = whole.narrow(placement.dim, 0, 0)
    return pieces[rank] if rank < len(pieces) else empty


def reshard(rank, folder, expected, out):
    """One process of several: loads all tensors under each placement and notes
    which differ."""
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    found = {}
    wholes = torch.load(expected, weights_only=True)
    for title, placement in PLACEMENTS.items():
        state, wanted = {}, {}
        for name, whole in wholes.items():
            if isinstance(placement, Shard) and whole.ndim <= placement.dim:
                continue
            wanted[name] = part(whole, placement, rank)
            local = spoiled(wanted[name].shape, whole.dtype)
            strides = torch.empty(whole.shape, device="meta").stride()
            state[name] = DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=whole.shape, stride=strides
            )
        load(folder, state)
        wrong = [n for n in wanted if raw_bytes(state[n].to_local()) != raw_bytes(wanted[n])]
        found[title] = {"tensors": len(wanted), "wrong": wrong}
    with open(os.path.join(out, f"found-{rank}.json"), "w", encoding="utf-8") as f:
        json.dump(found, f)
    dist.destroy_process_group()


def reshard_everywhere(folder, wholes, out):
    expected = out / "expected.pt"
    torch.save(wholes, expected)
    torch.multiprocessing.spawn(reshard, args=(str(folder), str(expected), str(out)), nprocs=PROCESSES)
    return [json.loads((out / f"found-{rank}.json").read_text()) for rank in range(PROCESSES)]


def tensor_of(data, dtype, shape):
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


@pytest.fixture(scope="module")
def resharded(checkpoint, tmp_path_factory):
    wholes = {n: tensor_of(t.bytes().tobytes(), DTYPES[t.dtype], t.shape) for n, t in checkpoint.for_torch().items()}
    return reshard_everywhere(checkpoint.folder, wholes, tmp_path_factory.mktemp("resharded"))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_processes_load_into_dtensors(resharded, placement):
    for rank, found in enumerate(resharded):
        assert found[placement]["wrong"] == [], f"process {rank}"
        assert found[placement]["tensors"] > 20


# ------------------------------------------------ a checkpoint of the trainer


class Trained:
    """A run of the example trainer on two MPI ranks, its last checkpoint, and
    its state as it dumped it itself."""

    def __init__(self, build, folder):
        program = build / "examples" / "gpt-c" / "gpt-c"
        if not program.exists():
            pytest.skip("the trainer was not built: MPI was not found")
        data = written.ROOT / "examples" / "gpt-c" / "data" / "persuasion.txt"
        command = [written.ROOT / "tests" / "mpirun.sh", "2", program, "--root", folder / "root", "--data", data]
        command += ["--steps", "6", "--save-every", "3", "--dump", folder / "dump"]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        done = subprocess.run(
            [str(c) for c in command], capture_output=True, text=True, timeout=written.SECONDS, check=False, env=environment
        )
        if done.returncode == 77:
            pytest.skip("there is no mpirun")
        assert done.returncode == 0, done.stderr
        self.folder = max((folder / "root").glob("step-000000000006.*"))
        self.manifest = json.loads((self.folder / "lastgood.json").read_text(encoding="utf-8"))
        line, _, self.dump = (folder / "dump").read_bytes().partition(b"\n")
        self.parameters = int(line.split()[-2])
        self.tensors = {t["name"]: t for t in self.manifest["tensors"]}

    def wholes(self):
        """All tensors by name, from the dump: parameters, then both moments,
        each in the order of the flat buffer that the moments are cut from."""
        found = {}
        for name, entry in self.tensors.items():
            parameter = entry.get("alias_of", name).removeprefix("optim.state.")
            block = 0
            for number, moment in enumerate([".exp_avg", ".exp_avg_sq"], 1):
                if parameter.endswith(moment):
                    parameter, block = parameter.removesuffix(moment), number
            at = int(self.tensors[f"optim.state.{parameter}.exp_avg"]["flat_offset"])
            begin = 4 * (block * self.parameters + at)
            data = self.dump[begin : begin + 4 * math.prod(entry["shape"])]
            found[name] = tensor_of(data, torch.float32, tuple(entry["shape"]))
        return found


@pytest.fixture(scope="module")
def trained(build, tmp_path_factory):
    return Trained(build, tmp_path_factory.mktemp("trained"))


def test_a_checkpoint_of_the_trainer_loads_on_one_process(trained):
    wholes = trained.wholes()
    assert len(wholes) > 30 and "lm_head.weight" in wholes
    assert trained.manifest["world"] == 2
    state = {name: spoiled(t.shape, t.dtype) for name, t in wholes.items()}
    load(trained.folder, state)
    for name, whole in wholes.items():
        assert raw_bytes(state[name]) == raw_bytes(whole), name
    assert len({raw_bytes(t) for t in wholes.values()}) > 20  # not all zeros


def test_a_checkpoint_of_the_trainer_loads_on_two_processes(trained, tmp_path):
    for rank, found in enumerate(reshard_everywhere(trained.folder, trained.wholes(), tmp_path)):
        for placement in PLACEMENTS:
            assert found[placement]["wrong"] == [], f"process {rank}, {placement}"
