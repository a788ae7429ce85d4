# SPDX-License-Identifier: Apache-2.0
"""lastgood: training checkpoints in shards, and runs that resume from the last good one.

Arrays and nested state in one call each::

    lastgood.save("runs/a", {"w": w, "step": 3})
    tree = lastgood.load("runs/a")
    rows = lastgood.open("runs/a")["w"][16:32]

A PyTorch training run that is taken up again where it was, on any number of ranks: :class:`Checkpointer`
(docs/first-checkpoint.md); the level below it: :class:`Session` (docs/python.md).
"""

import importlib
from typing import TYPE_CHECKING, Any

from lastgood import tagged
from lastgood._core import ffi as _ffi
from lastgood._core import lib as _lib
from lastgood.arrays import RawArray
from lastgood.background import KeyValueStore
from lastgood.checkpoint import Box, Checkpoint, Generation, StoredFile, StoredTensor
from lastgood.comm import Communicator, ThreadCommunicator
from lastgood.errors import (
    CancelledError,
    CommunicatorError,
    ConflictError,
    CorruptError,
    DamageError,
    EmptyRootError,
    Error,
    ExistsError,
    FormatError,
    InvalidError,
    LimitError,
    MismatchError,
    MissingError,
    NoGoodCheckpoint,
    NoSpaceError,
    NotDurableError,
    NotFoundError,
    OtherRunError,
    OutOfMemoryError,
    PermissionDeniedError,
    ProtectedError,
    StateError,
    Status,
    StoreError,
    SupersededError,
    TimeoutError,
    UnsupportedError,
    VersionError,
    WorldError,
)
from lastgood.layout import Layout, Split
from lastgood.load import Load
from lastgood.roots import Entry, Pruned, Swept, entries, pin, prune, remove, rollback, sweep, unpin
from lastgood.safetensors_file import SafetensorsFile
from lastgood.sampler import Sampler
from lastgood.saving import LaunchInfo, Save, SaveInfo
from lastgood.session import Resumed, Session, SessionStatus, Skipped
from lastgood.simple import Loaded, Mismatch, load, load_into, open, save
from lastgood.verify import Problem, Verified

if TYPE_CHECKING:
    from lastgood import data, random
    from lastgood.checkpointer import Checkpointer
    from lastgood.rehearsal import ResumeCheck, check_resume
    from lastgood.run import Run
    from lastgood.state import EMA, PerRank, State

__version__: str = _ffi.string(_lib.lg_version()).decode()

__all__ = [
    "EMA",
    "Box",
    "CancelledError",
    "Checkpoint",
    "Checkpointer",
    "Communicator",
    "CommunicatorError",
    "ConflictError",
    "CorruptError",
    "DamageError",
    "EmptyRootError",
    "Entry",
    "Error",
    "ExistsError",
    "FormatError",
    "Generation",
    "InvalidError",
    "KeyValueStore",
    "LaunchInfo",
    "Layout",
    "LimitError",
    "Load",
    "Loaded",
    "Mismatch",
    "MismatchError",
    "MissingError",
    "NoGoodCheckpoint",
    "NoSpaceError",
    "NotDurableError",
    "NotFoundError",
    "OtherRunError",
    "OutOfMemoryError",
    "PerRank",
    "PermissionDeniedError",
    "Problem",
    "ProtectedError",
    "Pruned",
    "RawArray",
    "ResumeCheck",
    "Resumed",
    "Run",
    "SafetensorsFile",
    "Sampler",
    "Save",
    "SaveInfo",
    "Session",
    "SessionStatus",
    "Skipped",
    "Split",
    "State",
    "StateError",
    "Status",
    "StoreError",
    "StoredFile",
    "StoredTensor",
    "SupersededError",
    "Swept",
    "ThreadCommunicator",
    "TimeoutError",
    "UnsupportedError",
    "Verified",
    "VersionError",
    "WorldError",
    "check_resume",
    "data",
    "entries",
    "load",
    "load_into",
    "open",
    "pin",
    "prune",
    "random",
    "remove",
    "rollback",
    "save",
    "sweep",
    "tagged",
    "unpin",
]

# What needs torch is imported when it is asked for.
_LATER = {
    "Checkpointer": "checkpointer",
    "EMA": "state",
    "PerRank": "state",
    "ResumeCheck": "rehearsal",
    "Run": "run",
    "State": "state",
    "check_resume": "rehearsal",
    "data": "",
    "random": "",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'lastgood' has no attribute {name!r}")
    module = importlib.import_module(f"lastgood.{_LATER[name] or name}")
    found = getattr(module, name) if _LATER[name] else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
