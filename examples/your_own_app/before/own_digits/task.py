"""Model, data, training and testing: nothing of Flower."""

import functools

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

TEST_SAMPLES = 360


class Net(nn.Module):
    """A network for 8x8 images in ten classes; it begins with the same weights each time."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.hidden = nn.Linear(64, 128)
            self.out = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of images of shape (n, 64)."""
        return self.out(torch.relu(self.hidden(images)))


@functools.cache
def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 training and 360 test images, which come with scikit-learn."""
    images, targets = load_digits(return_X_y=True)
    split = train_test_split(
        torch.tensor(images / 16.0, dtype=torch.float32),
        torch.tensor(targets),
        test_size=TEST_SAMPLES,
        random_state=0,
        stratify=targets,
    )
    train_images, test_images, train_targets, test_targets = split
    return TensorDataset(train_images, train_targets), TensorDataset(test_images, test_targets)


def share_of(data: Dataset, place: int, count: int) -> Subset:
    """Return every count-th sample, beginning with the place-th."""
    return Subset(data, range(place, len(data), count))


def train_on(net: nn.Module, data: Dataset, epochs: int, batch_size: int, lr: float) -> float:
    """Train, and return the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        total = 0.0
        for images, targets in DataLoader(data, batch_size=batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), targets)
            loss.backward()
            optimizer.step()
            total += float(loss) * len(targets)
    return total / len(data)


def accuracy_on(net: nn.Module, data: TensorDataset) -> float:
    """Return the share of images that the network gets right."""
    images, targets = data.tensors
    with torch.no_grad():
        return float((net(images).argmax(dim=1) == targets).float().mean())
