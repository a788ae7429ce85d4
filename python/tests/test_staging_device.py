# SPDX-License-Identifier: Apache-2.0
"""Training on a device whose kernels and copies run late: every checkpoint is the state at its step. And what is asked of
the device while a graph is recorded."""

import threading

import lastgood
import pytest
import torch
from fake_device import FakeDevice, devices
from lastgood.checkpointer import Checkpointer
from torch import nn
from torch.optim.adamw import adamw
from training import State

WIDE = 200


class Capturable(torch.optim.AdamW):
    """AdamW as with ``capturable=True``: the host only starts kernels, and the step count is on the device, too."""

    def __init__(self, parameters, fake):
        super().__init__(parameters, lr=1e-2)
        self.fake = fake
        for p in self.param_groups[0]["params"]:
            self.state[p] = {
                "step": fake.tensor(torch.zeros(())),
                "exp_avg": fake.tensor(torch.zeros_like(p.detach())),
                "exp_avg_sq": fake.tensor(torch.zeros_like(p.detach())),
            }

    def step(self, closure=None):
        group = self.param_groups[0]
        parameters = [p.detach() for p in group["params"]]
        # As of CUDA's kernels, what they write late is counted when they start.
        states = [self.state[p] for p in group["params"]]
        written = [*group["params"], *(t for state in states for t in state.values())]
        for t in written:
            torch.autograd.graph.increment_version(t)
        parameters = [t.data for t in parameters]
        steps, first, second = ([s[key].data for s in states] for key in ("step", "exp_avg", "exp_avg_sq"))

        def kernel():
            with torch.no_grad():
                gradients = [p * 2 + 1 for p in parameters]
                adamw(
                    parameters, gradients, first, second, [], steps, foreach=False, fused=False, amsgrad=False,
                    beta1=0.9, beta2=0.999, lr=1e-2, weight_decay=0.01, eps=1e-8, maximize=False,
                )  # fmt: skip

        self.fake.compute(kernel, writes=written)


class Scene:
    def __init__(self, fake):
        self.fake = fake
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 4))
        self.model.register_buffer("seen", torch.zeros(WIDE))
        for t in self.model.state_dict(keep_vars=True).values():
            fake.tensor(t)
        self.optimizer = Capturable(self.model.parameters(), fake)
        self.state = State(model=self.model, optim=self.optimizer)

    def forward(self):
        """Writes a buffer, and reads parameters."""
        seen = self.model.seen
        parameters = list(self.model.parameters())
        self.fake.compute(lambda: seen.data.add_(1), reads=parameters, writes=[seen])

    def tensors(self):
        """When all kernels have run."""
        self.fake.synchronize()
        found = {n: t.detach().clone() for n, t in self.model.state_dict().items()}
        for n, p in self.model.named_parameters():
            found |= {f"optim.state.{n}.{k}": t.clone() for k, t in self.optimizer.state[p].items()}
        return found


def check(root, step, wanted):
    found = lastgood.load(f"{root}@{step}", framework="torch")
    for name, t in wanted.items():
        assert torch.equal(found[name], t), (step, name)


@pytest.mark.parametrize("seed", range(3))
def test_k04_f056_an_optimizer_that_lives_on_the_device_is_saved_as_it_was_at_its_step(seed, root):
    """Capturable AdamW does not run on a CPU; its order of kernels and copies does. The reference runs no save."""
    other = Scene(still := FakeDevice(seed, "still"))
    wanted = {}
    for step in range(1, 6):
        other.forward()
        other.optimizer.step()
        wanted[step] = other.tensors()
    still.end()
    fake = FakeDevice(seed)
    with devices(fake), Checkpointer(root, every=1, timeout=60) as ckpt:
        s = Scene(fake)
        ckpt.resume(s.state)
        for _ in range(5):
            s.forward()
            s.optimizer.step()
            ckpt.step(s.state)
        ckpt.wait()
        fake.synchronize()
        assert fake.faults == [], seed
        assert fake.copied > 0
    for step, tensors in wanted.items():
        assert tensors["optim.state.0.weight.step"] == step
        check(root, step, tensors)


def test_nothing_is_asked_of_a_device_by_another_thread_while_a_graph_is_recorded(root):
    """A save is under way, its copies have not begun, and the optimizer's update is recorded: neither the thread that
    writes the save nor the fence disturbs the recording, and the save has the values of before."""
    fake = FakeDevice()
    with devices(fake), Checkpointer(root, timeout=60) as ckpt:
        s = Scene(fake)
        ckpt.resume(s.state)
        for step in (1, 2):
            s.forward()
            s.optimizer.step()
            ckpt.step(s.state, step=step)  # seen to fire its hook: lazy from now on
        s.forward()
        s.optimizer.step()
        wanted = s.tensors()
        fake.hold("copies")
        ckpt.step(s.state, step=3)
        ckpt.save(s.state, step=3)
        fake.captures = True
        late = threading.Timer(0.2, fake.release)
        late.start()
        s.optimizer.step()  # its hook is the fence, which the copies hold up
        assert late.finished.is_set()
        late.join()
        # The save commits while the recording goes on.
        assert ckpt.wait().step == 3
        fake.captures = False
        fake.synchronize()
        assert fake.faults == []
    check(root, 3, wanted)
