"""Train a small network on the digits of scikit-learn with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(lightning.LightningModule):
    """Two layers, and a learning rate that falls to zero."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the accuracy."""
        inputs, targets = batch
        accuracy = (self.net(inputs).argmax(1) == targets).float().mean()
        self.log("accuracy", accuracy)

    def configure_optimizers(self):
        """Return SGD with a cosine schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    """Train, validate after each epoch, and save the best and the last model."""
    lightning.seed_everything(0)
    inputs, targets = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(targets))
    train, test = random_split(digits, [1500, len(digits) - 1500])
    best = ModelCheckpoint("checkpoints", monitor="accuracy", mode="max")
    trainer = lightning.Trainer(
        max_epochs=8,
        callbacks=[best],
        logger=CSVLogger("."),
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    trainer.fit(
        Digits(),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(test, batch_size=len(test)),
    )
    trainer.save_checkpoint("digits.ckpt")
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}, best {best.best_model_score:.3f}")


if __name__ == "__main__":
    main()
