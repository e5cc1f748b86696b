"""A training script that uses what larger scripts use."""

import os

import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import flower_blsgd

from script import data, model  # isort: skip  (in this folder)


class Checkpointed(nn.Module):
    """A network that computes its activations again in the backward pass."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.net, batch, use_reentrant=False)
        return output


def main() -> None:
    """Train until the run is over."""
    net = Checkpointed(model())
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
    session = flower_blsgd.join(net, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    inputs, targets = data()
    dataset = TensorDataset(inputs, targets)
    sampler = session.sampler(dataset)
    loader = DataLoader(dataset, session.batch_size // 2, sampler=sampler)
    samples = 0
    best, best_round, steps = 0.0, -1, 0
    for number, (batch, labels) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(net(batch), labels)
        scaler.scale(loss / 2).backward()
        samples += len(batch)
        if number % 2:  # gradients are accumulated
            continue
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert norm.isfinite()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.distributed.all_reduce(loss.detach())
        order = session.order
        session.step(samples=samples)
        samples = 0
        schedule.step()
        steps += 1
        if session.order is not order:  # the model is the averaged one
            accuracy = (net(inputs).argmax(1) == targets).float().mean().item()
            if accuracy > best:
                best, best_round = accuracy, order.round if order else 0
        if session.done:
            break
    torch.distributed.destroy_process_group()
    accuracy = (net(inputs).argmax(1) == targets).float().mean().item()
    print(f"rank {session.rank}: accuracy {accuracy:.4f}", flush=True)
    print(f"rank {session.rank}: steps {steps}, best {best:.4f} after round {best_round}")


if __name__ == "__main__":
    main()
