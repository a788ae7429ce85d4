# SPDX-License-Identifier: Apache-2.0
"""The states that are saved and loaded: names to torch tensors."""

from __future__ import annotations

import mmap

import torch

State = dict[str, torch.Tensor]


def _shapes(layers: int, width: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a model like GPT-2: 7 a layer, 3 besides."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocab, width), "wpe.weight": (1024, width)}
    for i in range(layers):
        shapes[f"h.{i}.ln_1.weight"] = (width,)
        shapes[f"h.{i}.attn.c_attn.weight"] = (3 * width, width)
        shapes[f"h.{i}.attn.c_proj.weight"] = (width, width)
        shapes[f"h.{i}.ln_2.weight"] = (width,)
        shapes[f"h.{i}.mlp.c_fc.weight"] = (4 * width, width)
        shapes[f"h.{i}.mlp.c_fc.bias"] = (4 * width,)
        shapes[f"h.{i}.mlp.c_proj.weight"] = (width, 4 * width)
    shapes["ln_f.weight"] = (width,)
    return shapes


Forms = dict[str, tuple[tuple[int, ...], torch.dtype]]


def big_forms(quick: bool) -> Forms:
    """Shape and dtype of each tensor of :func:`big`; all first dimensions can be halved twice."""
    shapes = _shapes(2, 256, 1024) if quick else _shapes(12, 1024, 58368)
    forms: Forms = {n: (s, torch.bfloat16) for n, s in shapes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        forms |= {f"optim.state.{n}.{moment}": (s, torch.float32) for n, s in shapes.items()}
    return forms


def big(quick: bool) -> State:
    """bf16 weights and fp32 exp_avg and exp_avg_sq of 211.8 million parameters: 261 tensors, 2.1 GB. Quick: 18 MB."""
    return _filled(big_forms(quick))


def small(quick: bool) -> State:
    """20,000 tensors of 4 KiB. Quick: 500."""
    return _filled({f"t.{i:05d}": ((1024,), torch.float32) for i in range(500 if quick else 20000)})


# One tensor of 16 MiB of the big state, of which 16 rows are wanted.
ONE = "optim.state.h.1.mlp.c_fc.weight.exp_avg"
ROWS = slice(100, 116)


def _filled(names: Forms) -> State:
    """Memory that is touched, with contents that no compression helps. One thread: it is forked afterwards."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1 << 20, generator=generator)
    state: State = {}
    for i, (name, (shape, dtype)) in enumerate(names.items()):
        t = torch.empty(shape, dtype=dtype)
        flat = t.view(-1)
        for at in range(0, flat.numel(), noise.numel()):
            part = flat[at : at + noise.numel()]
            part.copy_(noise[: part.numel()])
        flat[:1] = i % 251
        state[name] = t
    return state


def nbytes(state: State) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in state.values())


def destination(state: State) -> State:
    """Tensors of the same forms in memory that all processes share, touched: what is loaded into."""
    total = sum(-(-t.numel() * t.element_size() // 64) * 64 for t in state.values())
    memory = mmap.mmap(-1, max(total, 1))
    found: State = {}
    at = 0
    for name, t in state.items():
        size = t.numel() * t.element_size()
        found[name] = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=at).view(t.shape)
        found[name].zero_()
        at += -(-size // 64) * 64
    return found


def check(state: State, got: State, names: list[str] | None = None) -> None:
    """Raises if tensors differ."""
    for name in names or state:
        if not torch.equal(state[name].view(torch.uint8), got[name].view(torch.uint8)):
            raise ValueError(f"{name} was loaded wrong")
