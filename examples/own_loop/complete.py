"""Train a ResNet on a folder of images."""

import torch
from parts import accuracy, arguments, forever, images
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.models import resnet18

import flower_blsgd


def main():
    """Train in float16 on a GPU and in float32 on a CPU."""
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    train, test = images(options.data, options.size)
    model = resnet18(num_classes=len(train.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    session = flower_blsgd.join(model, optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=is_cuda)
    reading = {"batch_size": options.batch_size, "num_workers": options.processes}
    loader = DataLoader(train, sampler=session.sampler(train), **reading)
    testing = DataLoader(test, 64)
    session.scheduler(optimizer, lambda progress: 1 - progress)
    session.evaluate(lambda net: {"accuracy": accuracy(net, testing, device)}, every=len(train))
    for step, (inputs, targets) in enumerate(forever(loader), 1):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16, enabled=is_cuda):
            loss = cross_entropy(model(inputs.to(device)), targets.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        session.step(samples=len(inputs))
        if session.done or (session.is_alone and step == options.steps):
            break
    if session.is_main:
        torch.save(model.state_dict(), "resnet.pt")
    print(f"accuracy {accuracy(model, testing, device):.3f}", flush=True)


if __name__ == "__main__":
    main()
