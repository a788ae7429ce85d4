# SPDX-License-Identifier: Apache-2.0
"""How a launch takes tensors from a device: into host memory that the device can write to, allocated once, by copies on
a stream of their own. The host waits for nothing: the trainer's stream waits for the copies, at the launch for what may
change at any time, at the fence for what is lazy; and the library's thread sees in memory, by a number that the device
writes last, that they are done. Nothing is asked of the device from another thread.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from lastgood import arrays, dtypes
from lastgood.errors import StateError

# Host memory is taken in pieces that grow with what is there, within these.
_LEAST, _MOST = 1 << 20, 256 << 20
# Where a tensor begins in it: large ones with a page, so that they may be written to disk from there.
_SMALL, _LARGE, _LARGE_FROM = 64, 4096, 64 << 10


class Device(Protocol):
    """One device as the trainer's thread uses it. Streams run on their own and in order; no function here waits for
    them, but for :meth:`finish`.

    The *compute stream* is the one that the trainer's thread has at the time of the call, the *copy stream* the
    device's own for this.
    """

    def pin(self, host: Any) -> Callable[[], None] | None:
        """Makes host memory (a tensor of bytes) such that the device can write to it. Returns what undoes that."""

    def capturing(self) -> bool:
        """Whether the compute stream records a graph now, and runs nothing."""

    def begin(self) -> None:
        """What follows on the copy stream comes after all that is on the compute stream now."""

    def copy(self, host: Any, source: Any) -> None:
        """On the copy stream: a tensor of the device to one in host memory, of equal shape and dtype."""

    def record(self) -> Any:
        """An event behind all that is on the copy stream."""

    def wait(self, event: Any) -> None:
        """The compute stream goes on only after the event. Not the host."""

    def follow(self, event: Any) -> None:
        """The same for the copy stream and an event of another device."""

    def signal(self, flag: Any, value: int) -> None:
        """On the copy stream: writes a number to host memory (a tensor of one int64) after all copies before."""

    def finish(self) -> None:
        """Waits until the copy stream is empty."""


class CudaDevice:
    """A CUDA (or ROCm) device of torch.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", index)
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            self._value = torch.zeros(1, dtype=torch.int64, device=self._device)

    def pin(self, host: Any) -> Callable[[], None]:
        """Registers it with CUDA, for all devices."""
        cuda = self._torch.cuda
        address, size = host.data_ptr(), host.numel()
        portable = 1  # cudaHostRegisterPortable: for all devices
        with cuda.device(self._device):
            cuda.check_error(int(cuda.cudart().cudaHostRegister(address, size, portable)))

        def undo() -> None:
            cuda.cudart().cudaHostUnregister(address)

        return undo

    def capturing(self) -> bool:
        """Of the current stream."""
        with self._torch.cuda.device(self._device):
            return bool(self._torch.cuda.is_current_stream_capturing())

    def begin(self) -> None:
        """The copy stream waits for the current one."""
        self._copies.wait_stream(self._torch.cuda.current_stream(self._device))

    def copy(self, host: Any, source: Any) -> None:
        """Does not wait for the copy."""
        with self._torch.cuda.stream(self._copies):
            host.copy_(source, non_blocking=True)

    def record(self) -> Any:
        """A CUDA event."""
        return self._copies.record_event()

    def wait(self, event: Any) -> None:
        """The current stream does."""
        self._torch.cuda.current_stream(self._device).wait_event(event)

    def follow(self, event: Any) -> None:
        """The copy stream does."""
        self._copies.wait_event(event)

    def signal(self, flag: Any, value: int) -> None:
        """By a copy from the device, behind the others."""
        with self._torch.cuda.stream(self._copies):
            self._value.fill_(value)
            flag.copy_(self._value, non_blocking=True)

    def finish(self) -> None:
        """The host waits."""
        self._copies.synchronize()


# Finds the device of a tensor that is not in host memory. Tests add their own in front.
_finders: list[Callable[[Any], Device | None]] = []
_cuda: dict[int, CudaDevice] = {}


def device_of(tensor: Any) -> Device | None:
    """Whose copies a tensor needs; None: it is in host memory, or on a device that is not known here, whose tensors are
    copied before the launch goes on.
    """
    for find in _finders:
        device = find(tensor)
        if device is not None:
            return device
    if not tensor.is_cuda:
        return None
    index = tensor.device.index
    if index not in _cuda:
        _cuda[index] = CudaDevice(index)
    return _cuda[index]


def in_host_memory(tensor: Any) -> bool:
    """Whether the host may write to a tensor's memory."""
    if not tensor.is_cpu:
        return False
    return not _finders or all(find(tensor) is None for find in _finders)


class _Copy(NamedTuple):
    device: Device
    host: Any
    source: Any
    lazy: bool


class _Slab:
    """A piece of host memory that the device can write to. A child of fork does not inherit it."""

    def __init__(self, size: int, device: Device) -> None:
        import torch

        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.size = size
        undo = device.pin(self.bytes)
        # The mapping goes after it is no longer the device's.
        weakref.finalize(self, _unpin, undo, memory).atexit = False


def _unpin(undo: Callable[[], None] | None, _memory: Any) -> None:
    if undo is not None:
        undo()


class Staging:
    """The host memory of one session for what its launches take from devices: as much as the largest of them needs,
    kept from one to the next. What is reserved for a launch is written to only once the save before has ended.

    Args:
        cap: most bytes; 0: no cap.
    """

    def __init__(self, cap: int = 0) -> None:
        self.slabs: list[_Slab] = []
        self.bytes_held = 0
        self.cap = cap
        self._sources: list[Any] = []  # of copies that may not be done
        self._fences: list[tuple[Device, Any]] = []
        self._devices: list[Device] = []
        self._flag_slab: _Slab | None = None  # a page of its own, which no growth moves
        self._flag: Any = None
        self._value = 0

    def grow(self, size: int, device: Device) -> bool:
        """One more slab, of at least so many bytes. False: beyond the cap."""
        wanted = max(size, min(max(self.bytes_held, _LEAST), _MOST))
        if self.cap and self.bytes_held + wanted > self.cap:
            wanted = size
            if self.bytes_held + wanted > self.cap:
                return False
        self.slabs.append(_Slab(wanted, device))
        self.bytes_held += self.slabs[-1].size
        return True

    def flag(self, device: Device) -> tuple[int, int]:
        """The address of the number that says when memory is filled, and its value after the next time."""
        if self._flag_slab is None:
            self._flag_slab = _Slab(8, device)
            self._flag = self._flag_slab.bytes[:8].view(dtypes.imported("torch").int64)
        return self._flag.data_ptr(), self._value + 1

    def fill(self, copies: list[_Copy]) -> None:
        """Starts copies, in the trainer's thread. Nobody reads the memory any more."""
        devices: list[Device] = []
        for c in copies:
            if c.device not in devices:
                devices.append(c.device)
        for device in devices:
            _refuse_graphs(device)
        if self.done:
            self._sources = []
        self._sources += [c.source for c in copies]
        self._fences = []
        for device in devices:
            if device not in self._devices:
                self._devices.append(device)
            mine = [c for c in copies if c.device is device]
            eager, lazy = [c for c in mine if not c.lazy], [c for c in mine if c.lazy]
            device.begin()
            for c in eager:
                device.copy(c.host, c.source)
            if eager:
                device.wait(device.record())
            for c in lazy:
                device.copy(c.host, c.source)
            self._fences.append((device, device.record()))
        last = devices[-1]
        for device, event in self._fences:
            if device is not last:
                last.follow(event)
        self._value += 1
        last.signal(self._flag, self._value)

    @property
    def done(self) -> bool:
        """Whether all copies are done that were started. Asks no device."""
        return self._flag is None or int(self._flag.item()) >= self._value

    def fence(self) -> None:
        """What the trainer's stream does from now on comes after the copies. The host does not wait, unless the stream
        records a graph: an event of before cannot be part of that, so the copies are done before the recording goes on.
        """
        fences, self._fences = self._fences, []
        recording = [device for device, _ in fences if device.capturing()]
        while recording and not self.done:
            time.sleep(0.0005)  # asks no device
        for device, event in fences:
            if device not in recording:
                device.wait(event)
        if self.done:
            self._sources = []

    def finish(self) -> None:
        """Waits for copies that are under way."""
        for device in self._devices:
            device.finish()

    def close(self) -> None:
        """Waits for copies that are under way, and gives the memory back."""
        self.finish()
        self._sources, self._fences, self._devices, self.slabs = [], [], [], []
        self._flag = self._flag_slab = None
        self.bytes_held = 0


class Reserved:
    """What one launch takes from devices, and where to."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._copies: list[_Copy] = []
        self._slab = self._used = 0  # where the next one goes

    def add(self, name: str, tensor: Any, lazy: bool) -> arrays.Memory | None:
        """Host memory for a tensor of a device, whose contents come with :meth:`fill`.

        Args:
            name: for messages.
            lazy: it does not change before the fence; else it may, once the launch has returned.

        Returns:
            None: it is in host memory, or of an unknown device, or the cap is reached.

        Raises:
            UnsupportedError: it has no memory that can be described, or a dtype that safetensors lacks.
            StateError: a graph is being recorded.
        """
        device = device_of(tensor)
        if device is None:
            return None
        if not any(c.device is device for c in self._copies[-1:]):
            _refuse_graphs(device)
        dtype = arrays.torch_dtype(name, tensor)
        source = tensor.detach()
        if source.is_conj() or source.is_neg():
            source = source.resolve_conj().resolve_neg()
        room = self._room(source.numel() * source.element_size(), device)
        if room is None:
            return None
        host = room.view(source.dtype)
        host = host.as_strided(source.shape, source.stride()) if _dense(source) else host.view(source.shape)
        self._copies.append(_Copy(device, host, source, lazy))
        return arrays.torch_memory(name, host, dtype)

    def _room(self, size: int, device: Device) -> Any:
        """Bytes of a slab; None: beyond the cap. The same tensors get the same places at every launch."""
        slabs = self._staging.slabs
        alignment = _LARGE if size >= _LARGE_FROM else _SMALL
        while True:
            at = -(-self._used // alignment) * alignment
            if self._slab == len(slabs):
                if not self._staging.grow(size, device):
                    return None
            elif at + size <= slabs[self._slab].size:
                self._used = at + size
                return slabs[self._slab].bytes[at : at + size]
            else:
                self._slab, self._used = self._slab + 1, 0

    def expects(self) -> tuple[int, int] | None:
        """The address of the number that says when the memory is filled, and its value then; None: nothing is reserved."""
        return self._staging.flag(self._copies[0].device) if self._copies else None

    def fill(self) -> None:
        """Starts the copies."""
        self._staging.fill(self._copies)


def _refuse_graphs(device: Device) -> None:
    if device.capturing():
        raise StateError("a save is launched while a graph is recorded: its copies would become part of the graph")


def may_be_on_device(value: Any) -> bool:
    """Whether :func:`device_of` is worth asking."""
    torch = dtypes.imported("torch")
    return torch is not None and isinstance(value, torch.Tensor) and (bool(_finders) or not value.is_cpu)


def _dense(t: Any) -> bool:
    """Whether its elements fill its memory without gaps or overlaps, in whatever order: then it is copied as it lies."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
