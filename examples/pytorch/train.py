# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer on the characters of a novel; kill it at any moment and start it again.

python train.py --root runs/none
torchrun --nproc-per-node 2 train.py --parallel fsdp2 --root runs/fsdp2
"""

import argparse
import hashlib
import logging
from pathlib import Path

import lastgood
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

NOVEL = Path(__file__).resolve().parents[1] / "gpt-c" / "data" / "persuasion.txt"
CHARACTERS = 128  # ASCII


class Text(Dataset):
    """Windows of a text: characters, and the character that follows each."""

    def __init__(self, path: Path, context: int) -> None:
        self.characters = torch.tensor(list(path.read_bytes()))
        self.context = context

    def __len__(self) -> int:
        return (len(self.characters) - 1) // self.context

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.characters[i * self.context : (i + 1) * self.context + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a two-layer network, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + functional.dropout(self.out(attention.transpose(1, 2).flatten(2)), p)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm2(x)))), p)


class Transformer(nn.Module):
    """A GPT: logits of the next character, of shape (batch, context, CHARACTERS)."""

    def __init__(self, context: int = 32, width: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight  # tied

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a batch."""
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters. Collective where they are sharded."""
    sha = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        sha.update(whole.detach().numpy().tobytes())
    return sha.hexdigest()


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--root", required=True, help="folder of the checkpoints")
    p.add_argument("--parallel", choices=("none", "ddp", "fsdp2"), default="none")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--every", default="20", help='steps between checkpoints, or a time: "10min"')
    p.add_argument("--batch", type=int, default=12, help="samples of a step, of all ranks together")
    p.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    p.add_argument("--workers", type=int, default=0, help="of the data loader")
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--time-limit", help='save and stop in time for it: "4h"')
    p.add_argument("--text", type=Path, default=NOVEL)
    return p.parse_args()


def main() -> None:
    """Trains."""
    args = options()
    rank, world = 0, 1
    if args.parallel != "none":
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    micro_batch, rest = divmod(args.batch, world * args.accumulate)
    if rest:
        raise SystemExit(
            f"--batch {args.batch} cannot be shared out to {world} ranks x {args.accumulate} micro-batches"
        )

    torch.manual_seed(1)  # the same weights on all ranks
    model: nn.Module = Transformer(dropout=args.dropout)
    if args.parallel == "ddp":
        # It also keeps the order in which ranks are summed: docs/training-state.md, "Several ranks".
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif args.parallel == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    torch.manual_seed(2 + rank)  # but dropout of its own on each
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50)
    loader = lastgood.data.DataLoader(
        Text(args.text, 32), micro_batch, shuffle=True, seed=1, drop_last=True, num_workers=args.workers
    )

    state = lastgood.State(model=model, optim=optimizer, scheduler=scheduler, loader=loader)
    state.vars["characters"] = 0
    every = int(args.every) if args.every.isdecimal() else args.every
    with lastgood.Checkpointer(args.root, every=every, keep=3, time_limit=args.time_limit) as ckpt:
        run = ckpt.resume(state)
        for batches in run.steps(args.steps, accumulate=args.accumulate):
            loss = torch.zeros(())
            for x, y in batches:
                part = loss_of(model, x, y) / args.accumulate
                part.backward()
                loss += part.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state.vars["characters"] += args.batch * 32
            if world > 1:
                dist.all_reduce(loss)
            ckpt.step(state, metrics={"loss": loss / world})
            if rank == 0:
                print(f"step {ckpt.completed} loss {loss.item() / world:.6f}", flush=True)

    sha = digest(model)
    if rank == 0 and not ckpt.stopping:
        print(f"done: {ckpt.completed} steps, {state.vars['characters']} characters, sha256 {sha}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
