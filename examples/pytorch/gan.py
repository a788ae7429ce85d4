# SPDX-License-Identifier: Apache-2.0
"""Trains a GAN on points of a ring: two models, two optimizers, buffers that the forward pass writes.

python gan.py --root runs/gan
"""

import argparse
import logging

import lastgood
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as score
from train import digest


def generator() -> nn.Module:
    """From 8 random numbers to a point."""
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))


def discriminator() -> nn.Module:
    """From a point to whether it is a real one."""
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))


def main() -> None:
    """Trains."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--root", required=True, help="folder of the checkpoints")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(1)
    g, d = generator(), discriminator()
    optim_g = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optim_d = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    angle = torch.linspace(0, 2 * torch.pi, 2001)[:-1]
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    loader = lastgood.data.DataLoader(ring, 32, shuffle=True, seed=1, drop_last=True)

    state = lastgood.State(model=g, disc=d, optim=[optim_g, optim_d], loader=loader)
    with lastgood.Checkpointer(args.root, every=args.every, keep=3) as ckpt:
        for (real,) in ckpt.resume(state).steps(args.steps):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = g(torch.randn(len(real), 8))
            loss_d = score(d(real), ones) + score(d(fake.detach()), zeros)
            loss_d.backward()
            optim_d.step()
            optim_d.zero_grad()

            loss_g = score(d(fake), ones)
            loss_g.backward()  # leaves gradients in the discriminator too
            optim_g.step()
            optim_g.zero_grad()
            optim_d.zero_grad()
            ckpt.step(state, metrics={"generator": loss_g, "discriminator": loss_d})
            print(f"step {ckpt.completed} generator {loss_g.item():.6f} discriminator {loss_d.item():.6f}", flush=True)
    if not ckpt.stopping:
        print(f"done: {ckpt.completed} steps, sha256 {digest(nn.ModuleList([g, d]))}")


if __name__ == "__main__":
    main()
