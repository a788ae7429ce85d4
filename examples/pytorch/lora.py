# SPDX-License-Identifier: Apache-2.0
"""Tunes small matrices beside the frozen weights of a checkpoint of train.py; a checkpoint holds only these.

python train.py --root runs/base
python lora.py --base runs/base --root runs/lora
"""

import argparse
import logging
from pathlib import Path

import lastgood
import torch
from torch import nn
from train import NOVEL, Text, Transformer, digest, loss_of


class LoRA(nn.Module):
    """A frozen linear layer, and the product of two thin matrices added to it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def main() -> None:
    """Tunes."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", required=True, help="root of the run whose newest checkpoint is the base")
    p.add_argument("--root", required=True, help="folder of the checkpoints")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    p.add_argument("--text", type=Path, default=NOVEL)
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(1)
    model = Transformer()
    lastgood.load_into(model, args.base)  # the model's part of it
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loader = lastgood.data.DataLoader(Text(args.text, 32), 12, shuffle=True, seed=2, drop_last=True)

    # A resume compares the base with the one that the run was begun with.
    state = lastgood.State(model=model, optim=optimizer, loader=loader, frozen="skip")
    with lastgood.Checkpointer(args.root, every=args.every, keep=3) as ckpt:
        for batches in ckpt.resume(state).steps(args.steps):
            loss = loss_of(model, *batches[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(state, metrics={"loss": loss})
            print(f"step {ckpt.completed} loss {loss.item():.6f}", flush=True)
    if not ckpt.stopping:
        print(f"done: {ckpt.completed} steps, sha256 {digest(model)}")


if __name__ == "__main__":
    main()
