# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a training state as others read it: PyTorch's distributed reader, transformers."""

import importlib.util

import lastgood
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lastgood.parts import Saving
from states import bits, net, plain, ranks, save, train
from test_gloo import on_processes


def state(seed=0):
    model = net(seed)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, [opt])
    return model, opt


def folder_of(root):
    return str(root / lastgood.open(root).folder)


def test_torchs_reader_gives_equal_values_of_model_and_optimizer(root):
    model, opt = state()
    save(root, plain(model=model, optim=opt))
    names = [n for n, _ in model.named_parameters()]
    wanted = dict(model.state_dict()) | {
        f"optim.state.{n}.{k}": v
        for n, p in zip(names, model.parameters(), strict=True)
        for k, v in opt.state[p].items()
    }
    target = {n: torch.zeros_like(t) for n, t in wanted.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(folder_of(root)))
    assert bits(target) == bits(wanted)


def read_by_two(rank, folder, wanted):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (2,))
    target = {n: zeros(*t.shape, device_mesh=mesh, placements=[Shard(0)]) for n, t in wanted.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(folder))
    return all(torch.equal(target[n].full_tensor(), t) for n, t in wanted.items())


def test_torchs_reader_cuts_it_for_two_processes(root, tmp_path):
    model, opt = state()
    save(root, plain(model=model, optim=opt))
    wanted = {n: p.detach() for n, p in model.named_parameters()}
    wanted |= {f"optim.state.{n}.exp_avg": opt.state[p]["exp_avg"] for n, p in model.named_parameters()}
    assert on_processes(2, tmp_path, read_by_two, folder_of(root), wanted) == [True, True]


# -------------------------------------------------------------------- transformers

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def small(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(torch.arange(16).reshape(2, 8)).logits


def train_small(model, opt):
    x = torch.arange(16).reshape(2, 8)
    model(x, labels=x).loss.backward()
    opt.step()
    opt.zero_grad()


def write(root, model, opt, comm=None, who=None):
    with lastgood.Session(root, comm) as session, session.save(1) as s:
        plain(model=model, optim=opt).save(Saving(s, 1, who or ranks()))
        s.attach("config.json", model.config.to_json_string().encode())


@needs_transformers
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_opens_a_training_checkpoint_as_it_is(kind, root):
    """K11: with tied embeddings."""
    import transformers

    model = small(kind)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_small(model, opt)
    write(root, model, opt)
    opened, said = transformers.AutoModelForCausalLM.from_pretrained(folder_of(root), output_loading_info=True)
    assert not said["missing_keys"] and not said["mismatched_keys"]
    assert torch.equal(logits(opened), logits(model))


def write_by_two(rank, root):
    from lastgood.pytorch import GlooCommunicator
    from torch.distributed.fsdp import fully_shard

    comm = GlooCommunicator()
    model = small("llama")
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_small(model, opt)
    write(root, model, opt, comm, ranks(rank, 2, comm))
    return logits(model).tolist()  # tensors would pass through this process's memory, which ends


@needs_transformers
def test_transformers_opens_what_two_fsdp_ranks_saved(root, tmp_path):
    import transformers

    found = on_processes(2, tmp_path, write_by_two, root)
    for f in found:
        assert isinstance(f, list), f
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder_of(root))
    assert logits(opened).tolist() == found[0]
