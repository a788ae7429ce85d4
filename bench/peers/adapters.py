# SPDX-License-Identifier: Apache-2.0
"""Each tool, behind the same few calls. One that is not installed, or does not
do what is asked for, says so by raising Skip."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import mmap
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from measure import remove, sync_tree
from state import State, nbytes


class Skip(Exception):
    """Why a row is left out."""


def need(module: str) -> Any:
    """A module, or Skip."""
    try:
        return importlib.import_module(module)
    except Exception as why:
        first = str(why).splitlines()[0] if str(why) else ""
        raise Skip(f"{module}: {type(why).__name__}: {first}"[:200]) from why


class Pending:
    """A save under way: ``fence`` before the state may change, ``wait`` until it is complete."""

    def __init__(self, wait: Callable[[], Any], fence: Callable[[], Any] = lambda: None) -> None:
        self.wait = wait
        self.fence = fence


class Peer:
    """A tool. ``path`` is a name in a folder that does not exist yet, or what was saved there."""

    name: ClassVar[str]
    package: ClassVar[str]
    form: ClassVar[str]  # what it reads: tools of one form load what one of them has saved
    quick: ClassVar[bool] = False  # takes part in the quick run
    durable: ClassVar[bool] = False  # it syncs files, folders and the parent itself
    verifies: ClassVar[bool] = False  # bytes are checked when they are loaded
    saves: ClassVar[bool] = True
    loads: ClassVar[bool] = True
    partial: ClassVar[bool] = False  # reads one tensor, and rows of one, from a checkpoint
    starts: ClassVar[bool] = False  # saves in the background
    suits_small: ClassVar[bool] = True

    def prepare(self, state: State) -> None:
        """Imports what it needs."""

    def save(self, state: State, path: Path) -> None:
        """Returns when the tool says that it is done."""
        raise NotImplementedError

    def load(self, path: Path, target: State) -> None:
        """Into existing tensors."""
        raise NotImplementedError

    def load_one(self, path: Path, name: str, target: torch.Tensor) -> None:
        """One tensor."""
        raise NotImplementedError

    def load_rows(self, path: Path, name: str, rows: slice, target: torch.Tensor) -> None:
        """Rows of one tensor."""
        raise NotImplementedError

    def before(self, path: Path) -> None:
        """What a trainer has done long before a save; not timed."""

    def after(self, path: Path) -> None:
        """The checkpoint is removed next; not timed."""

    def launch(self, state: State, path: Path) -> Pending:
        """Starts to save; one that does it all at once is done."""
        self.save(state, path)
        if not self.durable:
            sync_tree(path)
        return Pending(lambda: None)

    def close(self) -> None:
        """Ends what :meth:`prepare` and the saves have started."""

    def version(self) -> str:
        """Of the package."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "?"


# ------------------------------------------------------------------- lastgood


class Lastgood(Peer):
    name = "lastgood"
    quick = True
    form = "lastgood"
    package = "lastgood"
    durable = verifies = partial = True
    verify = True

    def prepare(self, state: State) -> None:
        self.lastgood = need("lastgood")
        self.session: Any = None
        self.model = {n: t for n, t in state.items() if not n.startswith("optim.")}
        self.optim = {n: t for n, t in state.items() if n.startswith("optim.")}

    def before(self, path: Path) -> None:
        # A run of its own for each path, so that it can be removed like the others' files.
        self.session = self.lastgood.Session(path)

    def after(self, path: Path) -> None:
        self.session.close()

    def save(self, state: State, path: Path) -> None:
        with self.session.save(1) as save:
            save.tensors(self.model)
            save.tensors(self.optim, group="optim")

    def load(self, path: Path, target: State) -> None:
        with self.lastgood.open(path) as checkpoint:
            checkpoint.read_into(target, verify=self.verify)

    def load_one(self, path: Path, name: str, target: torch.Tensor) -> None:
        with self.lastgood.open(path) as checkpoint:
            checkpoint[name].into(target)

    def load_rows(self, path: Path, name: str, rows: slice, target: torch.Tensor) -> None:
        with self.lastgood.open(path) as checkpoint:
            checkpoint[name].into(target, rows)

    def version(self) -> str:
        return str(self.lastgood.__version__)


class LastgoodUnverified(Lastgood):
    name = "lastgood, unverified"
    saves = partial = verifies = False
    verify = False


class LastgoodAsync(Lastgood):
    name = "lastgood async"
    saves = loads = partial = False
    starts = True
    lazy = False

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.step = 0

    # One session for all saves, which keeps the last, as a run does.
    def before(self, path: Path) -> None:
        if self.session is None:
            self.root = path.with_name(f"{type(self).__name__}-root")
            self.session = self.lastgood.Session(self.root, keep_last=1)

    def after(self, path: Path) -> None:
        pass

    def launch(self, state: State, path: Path) -> Pending:
        self.step += 1
        with self.session.launch(self.step) as save:
            save.tensors(self.model, lazy=self.lazy)
            save.tensors(self.optim, group="optim", lazy=self.lazy)
        return Pending(self.session.wait, self.session.fence)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            remove(self.root)


class LastgoodLazy(LastgoodAsync):
    name = "lastgood async, lazy"
    lazy = True


# ---------------------------------------------------------------- torch itself


class TorchSave(Peer):
    name = "torch.save, torch.load"
    quick = True
    form = "torch"
    package = "torch"
    mmap = False

    def save(self, state: State, path: Path) -> None:
        torch.save(state, path)

    def load(self, path: Path, target: State) -> None:
        loaded = torch.load(path, weights_only=True, mmap=self.mmap)
        for name, t in target.items():
            t.copy_(loaded[name])

    def load_one(self, path: Path, name: str, target: torch.Tensor) -> None:
        target.copy_(torch.load(path, weights_only=True, mmap=self.mmap)[name])

    def load_rows(self, path: Path, name: str, rows: slice, target: torch.Tensor) -> None:
        target.copy_(torch.load(path, weights_only=True, mmap=self.mmap)[name][rows])


class TorchMmap(TorchSave):
    name = "torch.load, mmap"
    mmap = True
    saves = False
    partial = True


class Dcp(Peer):
    name = "DCP"
    form = "dcp"
    package = "torch"
    partial = True
    threads = 1

    def prepare(self, state: State) -> None:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        self.dcp = need("torch.distributed.checkpoint")

    def writer(self, path: Path) -> Any:
        return self.dcp.FileSystemWriter(path, thread_count=self.threads, single_file_per_rank=self.threads == 1)

    def reader(self, path: Path) -> Any:
        return self.dcp.FileSystemReader(path)

    def save(self, state: State, path: Path) -> None:
        self.dcp.save(state, storage_writer=self.writer(path), no_dist=True)

    def load(self, path: Path, target: State) -> None:
        self.dcp.load(target, storage_reader=self.reader(path), no_dist=True)

    def load_one(self, path: Path, name: str, target: torch.Tensor) -> None:
        self.dcp.load({name: target}, storage_reader=self.reader(path), no_dist=True)

    def load_rows(self, path: Path, name: str, rows: slice, target: torch.Tensor) -> None:
        raise Skip("DCP reads rows only for a DTensor of them")


class DcpTwoThreads(Dcp):
    name = "DCP, 2 threads"
    form = "dcp 2"
    threads = 2
    partial = False


class DcpHf(Dcp):
    name = "DCP, HF format"
    quick = True
    form = "dcp hf"

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.hf = need("torch.distributed.checkpoint.hf_storage")

    def writer(self, path: Path) -> Any:
        return self.hf.HuggingFaceStorageWriter(str(path))

    def reader(self, path: Path) -> Any:
        return self.hf.HuggingFaceStorageReader(str(path))


class DcpAsync(Dcp):
    """Its own default: what is staged is allocated anew for each save."""

    name = "DCP async"
    loads = saves = partial = False
    starts = True
    process = False

    def prepare(self, state: State) -> None:
        super().prepare(state)
        dist = need("torch.distributed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.staging = need("torch.distributed.checkpoint.staging")
        self.stager = self.make_stager()

    def make_stager(self) -> Any:
        return None

    def options(self, *, shared: bool = False, background: bool = False) -> Any:
        return self.staging.DefaultStager(self.staging.StagingOptions(False, shared, background, False))

    def launch(self, state: State, path: Path) -> Pending:
        kind = need("torch.distributed.checkpoint.state_dict_saver").AsyncCheckpointerType
        done = self.dcp.async_save(
            state,
            checkpoint_id=path,
            async_stager=self.stager,
            async_checkpointer_type=kind.PROCESS if self.process else kind.THREAD,
        )
        if hasattr(done, "upload_completion"):
            return Pending(done.upload_completion.result, done.staging_completion.result)
        return Pending(done.result)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DcpAsyncCached(DcpAsync):
    name = "DCP async, cached stager"
    quick = True

    def make_stager(self) -> Any:
        return self.options()


class DcpAsyncProcess(DcpAsync):
    name = "DCP async, process"
    process = True

    def prepare(self, state: State) -> None:
        # The process that it starts meets this one by TCP.
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29531")
        super().prepare(state)

    def make_stager(self) -> Any:
        return self.options(shared=True)


class DcpAsyncBackground(DcpAsync):
    name = "DCP async, background staging"

    def make_stager(self) -> Any:
        return self.options(background=True)


# --------------------------------------------------------------------- others


class Safetensors(Peer):
    name = "safetensors"
    quick = True
    form = "safetensors"
    package = "safetensors"
    partial = True

    def prepare(self, state: State) -> None:
        self.torch = need("safetensors.torch")
        self.safetensors = need("safetensors")

    def save(self, state: State, path: Path) -> None:
        self.torch.save_file(state, path)

    def load(self, path: Path, target: State) -> None:
        with self.safetensors.safe_open(path, framework="pt") as f:
            for name, t in target.items():
                t.copy_(f.get_tensor(name))

    def load_one(self, path: Path, name: str, target: torch.Tensor) -> None:
        with self.safetensors.safe_open(path, framework="pt") as f:
            target.copy_(f.get_tensor(name))

    def load_rows(self, path: Path, name: str, rows: slice, target: torch.Tensor) -> None:
        with self.safetensors.safe_open(path, framework="pt") as f:
            target.copy_(f.get_slice(name)[rows])


class Runai(Safetensors):
    name = "Run:ai model streamer"
    package = "runai-model-streamer"
    saves = False  # the files are those of safetensors
    partial = False

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.runai = need("runai_model_streamer")

    def load(self, path: Path, target: State) -> None:
        with self.runai.SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            for name, t in streamer.get_tensors():
                target[name].copy_(t)


class FastSafetensors(Safetensors):
    name = "fastsafetensors"
    package = "fastsafetensors"
    saves = False
    partial = False

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.fast = need("fastsafetensors")

    def load(self, path: Path, target: State) -> None:
        loader = self.fast.SafeTensorsFileLoader(self.fast.SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffers = loader.copy_files_to_device()
        for name, t in target.items():
            t.copy_(buffers.get_tensor(name))
        buffers.close()
        loader.close()


class TorchSnapshot(Peer):
    name = "torchsnapshot"
    form = "torchsnapshot"
    package = "torchsnapshot"
    partial = True
    starts = True

    def prepare(self, state: State) -> None:
        warnings.filterwarnings("ignore")
        # It wants pkg_resources of older setuptools only for its version.
        self.snapshot = need("torchsnapshot")

    def save(self, state: State, path: Path) -> None:
        self.snapshot.Snapshot.take(str(path), {"s": self.snapshot.StateDict(**state)})

    def launch(self, state: State, path: Path) -> Pending:
        pending = self.snapshot.Snapshot.async_take(str(path), {"s": self.snapshot.StateDict(**state)})
        return Pending(pending.wait)

    def load(self, path: Path, target: State) -> None:
        self.snapshot.Snapshot(str(path)).restore({"s": self.snapshot.StateDict(**target)})

    def load_one(self, path: Path, name: str, target: torch.Tensor) -> None:
        self.snapshot.Snapshot(str(path)).read_object(f"0/s/{name}", obj_out=target)

    def load_rows(self, path: Path, name: str, rows: slice, target: torch.Tensor) -> None:
        raise Skip("torchsnapshot reads whole tensors")


class Tensorizer(Peer):
    name = "tensorizer"
    form = "tensorizer"
    package = "tensorizer"
    suits_small = False  # "Metadata overflow"
    verify = False

    def prepare(self, state: State) -> None:
        self.tensorizer = need("tensorizer")

    def save(self, state: State, path: Path) -> None:
        serializer = self.tensorizer.TensorSerializer(str(path))
        serializer.write_state_dict(state)
        serializer.close()

    def load(self, path: Path, target: State) -> None:
        with self.tensorizer.TensorDeserializer(str(path), device="cpu", verify_hash=self.verify) as loaded:
            for name, t in target.items():
                t.copy_(loaded[name])


class TensorizerVerified(Tensorizer):
    name = "tensorizer, verified"
    saves = False
    verify = verifies = True


class Orbax(Peer):
    """Its state are JAX arrays over the same memory, and it loads new ones."""

    name = "orbax"
    form = "orbax"
    package = "orbax-checkpoint"
    starts = True

    def prepare(self, state: State) -> None:
        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore")
        self.jax = need("jax")
        self.orbax = need("orbax.checkpoint")
        ml_dtypes = need("ml_dtypes")
        self.arrays = {}
        for name, t in state.items():
            bf16 = t.dtype == torch.bfloat16
            a = t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if bf16 else t.numpy()
            self.arrays[name] = self.jax.numpy.asarray(a)
        self.saver = self.orbax.AsyncCheckpointer(self.orbax.PyTreeCheckpointHandler())

    def save(self, state: State, path: Path) -> None:
        self.saver.save(path, args=self.orbax.args.PyTreeSave(self.arrays))
        self.saver.wait_until_finished()

    def launch(self, state: State, path: Path) -> Pending:
        self.saver.save(path, args=self.orbax.args.PyTreeSave(self.arrays))
        return Pending(self.saver.wait_until_finished)

    def load(self, path: Path, target: State) -> None:
        loaded = self.saver.restore(path)
        self.jax.block_until_ready(loaded)
        self.loaded = set(loaded)

    def close(self) -> None:
        self.saver.close()


class DeepSpeed(Peer):
    name = "DeepSpeed FastFileWriter"
    form = "deepspeed"
    package = "deepspeed"
    loads = False  # the format is torch.save's

    def prepare(self, state: State) -> None:
        logging.disable(logging.WARNING)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        need("deepspeed")
        self.io = need("deepspeed.io")
        # It has this builder, but for CPUs it offers one that only raises.
        need("deepspeed.io.fast_file_writer").UtilsBuilder = need("deepspeed.ops.op_builder.utils").UtilsBuilder
        builder = need("deepspeed.ops.op_builder").AsyncIOBuilder()
        try:
            handle = builder.load(verbose=False).aio_handle
            self.handle = handle(8 << 20, 16, False, False, 1)
        except Exception as why:
            raise Skip(f"its asynchronous I/O could not be built: {str(why).splitlines()[0]}"[:200]) from why
        self.buffer = torch.zeros(64 << 20, dtype=torch.uint8)

    def save(self, state: State, path: Path) -> None:
        config = self.io.FastFileWriterConfig(
            dnvme_handle=self.handle,
            pinned_tensor=self.buffer,
            double_buffer=True,
            num_parallel_writers=1,
            writer_rank=0,
        )
        writer = self.io.FastFileWriter(file_path=str(path), config=config)
        torch.save(state, writer)
        writer.close()


class Disk(Peer):
    """No tool, but what the disk does: the same number of bytes in one preallocated file, 4 direct transfers of 1 MiB
    at once, fsync."""

    name = "(disk, direct)"
    quick = True
    form = "disk"
    package = "-"
    durable = True
    suits_small = False

    def prepare(self, state: State) -> None:
        self.blocks = [mmap.mmap(-1, 1 << 20) for _ in range(4)]
        for block in self.blocks:
            block.write(os.urandom(1 << 20))

    def _all(self, fd: int, size: int, move: Callable[[int, Any, int], Any]) -> None:
        places = iter(range(0, size, 1 << 20))
        lock = threading.Lock()

        def work(block: mmap.mmap) -> None:
            while True:
                with lock:
                    at = next(places, None)
                if at is None:
                    return
                move(fd, [block], at)

        threads = [threading.Thread(target=work, args=(block,)) for block in self.blocks]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def save(self, state: State, path: Path) -> None:
        size = -(-nbytes(state) // (1 << 20)) << 20
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            os.posix_fallocate(fd, 0, size)
            self._all(fd, size, os.pwritev)
            os.fsync(fd)
        finally:
            os.close(fd)

    def load(self, path: Path, target: State) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._all(fd, os.fstat(fd).st_size, os.preadv)
        finally:
            os.close(fd)

    def version(self) -> str:
        return "-"


class Memory(Disk):
    """No tool, but what memory does: one copy of each tensor."""

    name = "(memory, copied)"
    quick = True

    def load(self, path: Path, target: State) -> None:
        for name, t in target.items():
            t.copy_(self.state[name])

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.state = state


PEERS: list[type[Peer]] = [
    Lastgood,
    LastgoodUnverified,
    LastgoodAsync,
    LastgoodLazy,
    TorchSave,
    TorchMmap,
    Dcp,
    DcpTwoThreads,
    DcpHf,
    DcpAsync,
    DcpAsyncCached,
    DcpAsyncProcess,
    DcpAsyncBackground,
    Safetensors,
    Runai,
    FastSafetensors,
    TorchSnapshot,
    Tensorizer,
    TensorizerVerified,
    Orbax,
    DeepSpeed,
    Disk,
    Memory,
]


class Waiter(threading.Thread):
    """Waits for a save under way and syncs what its tool does not, beside the trainer."""

    def __init__(self, pending: Pending, peer: Peer, path: Path) -> None:
        super().__init__(daemon=True)
        self._pending, self._peer, self._path = pending, peer, path
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._pending.wait()
            if not self._peer.durable:
                sync_tree(self._path)
        except BaseException as why:
            self.error = why
