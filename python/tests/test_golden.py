# SPDX-License-Identifier: Apache-2.0
"""The rules by which data is ordered and random streams are seeded, as values: a run that goes on under another version
must get the same. They were computed by implementations of their own (Philox of Salmon et al., in Python).
"""

import random

import numpy as np
import pytest
import torch
from lastgood import Sampler
from lastgood.data import DataLoader
from lastgood.data.streams import COLLATE, OPEN, SAMPLE, WORKERS, seed_global, words
from lastgood.parts import Axis, Ranks
from lastgood.random import derived_words
from lastgood.sampler import philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of Random123
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox_gives_the_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


# Size, seed, epoch; samples at 0, n/3, n/2, n-1. As in tests/test_sampler.c.
ORDERS = [
    (1, 0, 0, (0, 0, 0, 0)),
    (5, 7, 3, (2, 3, 0, 4)),
    (10, 42, 0, (5, 8, 7, 9)),
    (10, 42, 1, (2, 8, 1, 4)),
    (600, 3735928559, 2, (320, 427, 177, 228)),
    (4097, 1, 1, (1900, 1244, 3731, 1427)),
    (1000000, 1234, 0, (760628, 793663, 690134, 861099)),
    (2**32, 2**64 - 1, 5, (1678668384, 4238611012, 3216446889, 1022199916)),
    (2**48, 0, 1, (33722429520396, 26406832547094, 72257766654489, 148328493644604)),
]


@pytest.mark.parametrize(("samples", "seed", "epoch", "expected"), ORDERS)
def test_k10_f176_the_order_of_an_epoch_is_frozen(samples, seed, epoch, expected):
    order = Sampler(samples, seed)
    at = (0, samples // 3, samples // 2, samples - 1)
    assert tuple(order.copy(epoch=epoch, consumed=i).peek(1)[0] for i in at) == expected


def place(rank, world):
    return Ranks(rank, world, (Axis("dp", world, rank),), ("dp",), None)


@pytest.mark.parametrize(("samples", "seed", "epoch", "expected"), [o for o in ORDERS if o[0] <= 600])
def test_k10_f176_a_loader_hands_out_that_order_between_its_ranks(samples, seed, epoch, expected):
    """Micro-batches count through the ranks."""
    world = 2 if samples > 1 else 1
    loaders = [DataLoader(range(samples), 1, shuffle=True, seed=seed) for _ in range(world)]
    found = []
    for rank, loader in enumerate(loaders):
        loader.bind(place(rank, world))
        loader.used(epoch * samples)
        found.append([int(b) for b in loader])
    together = [found[i % world][i // world] for i in range(samples)]
    assert tuple(together[i] for i in (0, samples // 3, samples // 2, samples - 1)) == expected


@pytest.mark.parametrize(
    ("token", "purpose", "expected"),
    [
        ((0, 0, 0), SAMPLE, (0xCDE87E10, 0x8005D38C, 0xC08D6B4B, 0x311C57CC)),
        ((0, 0, 0), COLLATE, (0x81BE663B, 0x38ADDA6C, 0x5443C0AE, 0x7B39274E)),
        ((0, 0, 0), OPEN, (0xEC5CA547, 0x25EC2510, 0x34620BB6, 0xAA25F61E)),
        ((0, 0, 0), WORKERS, (0x919F1F91, 0xAF13AABE, 0x14532747, 0x6720BAD8)),
        ((1, 0, 7), SAMPLE, (0xFDD84551, 0xC317116D, 0x702CD276, 0x576AB569)),
        ((2**63 + 5, 3, 2**40 + 9), SAMPLE, (0x1388A3F0, 0x8E47F452, 0x2AC27903, 0x490C202D)),
        ((2**63 + 5, 3, 2**40 + 9), WORKERS, (0x6097F42E, 0x142D3194, 0x0D8FB82F, 0xCED778FB)),
    ],
)
def test_k09_f142_the_seed_of_a_sample_is_frozen(token, purpose, expected):
    assert words(token, purpose) == expected


# What Python's generator draws first for samples 0 to 3 of epoch 2 with seed 1; NumPy's and torch's seeds.
DRAWS = [
    (2529091429, 516916487, 3180084485512586902),
    (2558132434, 3754202105, 1291354630554167147),
    (1170741834, 3660880473, 14987778948925138791),
    (426588436, 453623291, 10812723727335350841),
]


@pytest.mark.parametrize(("index", "expected"), list(enumerate(DRAWS)))
def test_k09_f142_what_a_sample_draws_is_frozen(index, expected):
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        seed_global((1, 2, index), SAMPLE)
        found = random.getrandbits(32), int(np.random.get_state()[1][0]), torch.initial_seed()
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    assert found == expected


class Draws:
    """Each item is its index, and what Python's generator draws for it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index, random.getrandbits(32)])


@pytest.mark.parametrize("workers", [0, 2])
def test_k09_f142_a_loader_s_workers_draw_that(workers):
    loader = DataLoader(Draws(), 2, shuffle=True, seed=1, num_workers=workers)
    loader.used(2 * 4)  # epoch 2
    found = dict(torch.cat(list(loader)).tolist())
    assert found == {index: draws[0] for index, draws in enumerate(DRAWS)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, (1, 1), "torch.cpu", 0), (0x0F2CAD01, 0x88107382, 0xDB93C5F5, 0x54C38997)),
        ((12345, (3, 17), "python", 2), (0x00DE7FCE, 0xD4850CB9, 0xC97A883F, 0xCECF27D0)),
        ((2**64 - 1, (2**33, 1), "generator.noise", 5), (0xC920DD2E, 0x2DF4DD10, 0xF2E71AE3, 0x253BBBA2)),
    ],
)
def test_k09_derived_streams_are_frozen(arguments, expected):
    assert derived_words(*arguments) == expected
