# SPDX-License-Identifier: Apache-2.0
"""Data for small training runs."""

import torch
from lastgood.data import DataLoader
from lastgood.state import EMA, State

__all__ = ["EMA", "State", "indices_loader", "numbers_loader"]


class Numbers:
    """A data set: each item is its index, and a number that is drawn for it."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(())


def numbers_loader(samples, batch_size, workers=0, drop_last=True):
    """Batches of indices and of numbers drawn for them."""
    return DataLoader(Numbers(samples), batch_size, shuffle=True, seed=3, num_workers=workers, drop_last=drop_last)


def indices_loader(samples, batch_size):
    """Batches of indices, as floats."""
    return DataLoader(torch.arange(float(samples)), batch_size, shuffle=True, seed=0)
