# SPDX-License-Identifier: Apache-2.0
"""Training data whose position a checkpoint keeps, for any number of ranks, workers and batch sizes::

    loader = lastgood.data.DataLoader(dataset, batch_size=8, shuffle=True, seed=1)
    state = lastgood.State(model=model, optim=optimizer, loader=loader)

docs/data.md is the guide. This module needs torch; ``import lastgood`` does not load it.
"""

from lastgood.data.iterable import Sharded
from lastgood.data.loader import DataLoader
from lastgood.data.part import PositionPart
from lastgood.data.sampler import ElasticSampler
from lastgood.data.source import Position
from lastgood.data.stateful import StatefulPart, stateful_part

__all__ = ["DataLoader", "ElasticSampler", "Position", "PositionPart", "Sharded", "StatefulPart", "stateful_part"]
