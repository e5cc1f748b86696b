"""Train a small network on handwritten digits with Hugging Face accelerate."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import flower_blsgd

STEPS = 600


def forever(loader):
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def main():
    """Train in bfloat16, and print the accuracy on the test digits."""
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
    every = TensorDataset(inputs, torch.tensor(digits.target))
    train, test = random_split(every, [1437, 360], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = flower_blsgd.join(model, optimizer)
    loader = DataLoader(train, session.batch_size, sampler=session.sampler(train))

    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (images, labels) in enumerate(forever(loader), 1):
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.step(samples=len(images))
        if session.done or (session.is_alone and step == STEPS):
            break

    images, labels = next(iter(accelerator.prepare(DataLoader(test, len(test)))))
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    where = f"{accelerator.num_processes} process on {accelerator.device}"
    accelerator.print(f"accuracy {accuracy:.3f}, {where}", flush=True)


if __name__ == "__main__":
    main()
