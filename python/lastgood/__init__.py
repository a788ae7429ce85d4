# SPDX-License-Identifier: Apache-2.0
"""lastgood: training checkpoints in shards, and runs that resume from the last good one.

Arrays and nested state in one call each::

    lastgood.save("runs/a", {"w": w, "step": 3})
    tree = lastgood.load("runs/a")
    rows = lastgood.open("runs/a")["w"][16:32]

A training run on any number of ranks: :class:`Session`. docs/python.md has both.
"""

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

__version__: str = _ffi.string(_lib.lg_version()).decode()

__all__ = [
    "Box",
    "CancelledError",
    "Checkpoint",
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
    "PermissionDeniedError",
    "Problem",
    "ProtectedError",
    "Pruned",
    "RawArray",
    "Resumed",
    "SafetensorsFile",
    "Sampler",
    "Save",
    "SaveInfo",
    "Session",
    "SessionStatus",
    "Skipped",
    "Split",
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
    "entries",
    "load",
    "load_into",
    "open",
    "pin",
    "prune",
    "remove",
    "rollback",
    "save",
    "sweep",
    "tagged",
    "unpin",
]
