# SPDX-License-Identifier: Apache-2.0
"""Where tests take a training state and a loader from."""

import torch
from fakes import Loader

try:
    import lastgood.data
    import lastgood.random
    from lastgood.state import EMA, State

    REAL = True
except ImportError:
    from fakes import EMA, State

    REAL = False

__all__ = ["EMA", "REAL", "Loader", "State", "loader_of"]


class Numbers:
    """A data set: each item is its index, and a number that is drawn for it."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(())


def loader_of(samples, batch_size, workers=0):
    """A loader of a shuffled data set of numbers."""
    if not REAL:
        return Loader(samples, batch_size)
    return lastgood.data.DataLoader(
        Numbers(samples), batch_size=batch_size, shuffle=True, seed=3, num_workers=workers, drop_last=True
    )
