"""Losses of every sample, by hand and against torch's means."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_blsgd import (
    binary_cross_entropy,
    causal_lm_loss,
    cross_entropy,
    mean_squared_error,
)

OUTPUTS = torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 0.0]])


def test_mean_over_the_samples_is_that_of_torch() -> None:
    labels, values = torch.tensor([0, 1, 1]), torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.5, 0.0]])
    for loss, of_torch, targets in (
        (cross_entropy, functional.cross_entropy, labels),
        (mean_squared_error, functional.mse_loss, values),
        (binary_cross_entropy, functional.binary_cross_entropy_with_logits, values),
    ):
        found = loss(OUTPUTS, targets)
        assert found.shape == (3,)
        assert found.mean().item() == pytest.approx(of_torch(OUTPUTS, targets).item())


def test_a_single_output_may_have_targets_without_a_column() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])
    assert mean_squared_error(outputs, targets).tolist() == [1.0, 4.0]
    assert mean_squared_error(outputs[:, 0], targets).tolist() == [1.0, 4.0]
    expected = [math.log(1 + math.e), math.log(1 + math.exp(-3.0))]
    assert binary_cross_entropy(outputs, targets).tolist() == pytest.approx(expected)


class Bigram(nn.Module):
    """Predicts that the next token is the same one, with a logit of 1; padding is seen too."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=functional.one_hot(input_ids, 3).float())


def test_loss_of_a_language_model_is_the_mean_over_the_tokens_of_each_text() -> None:
    """Of three logits, the right one is 1 or 0, the others 0 or one of them 1."""
    same, other = math.log(math.e + 2) - 1, math.log(math.e + 2)
    batch = {
        "input_ids": torch.tensor([[1, 1, 2, 2], [2, 0, 0, 0], [1, 1, 1, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
    }
    expected = [(same + other + same) / 3, other, 0.0]  # a text of one token has no loss
    assert causal_lm_loss(Bigram(), batch).tolist() == pytest.approx(expected)
    labels = torch.tensor([[-100, -100, 2, 2], [-100, 0, 0, 0], [-100] * 4])
    expected[0] = (other + same) / 2
    assert causal_lm_loss(Bigram(), batch | {"labels": labels}).tolist() == pytest.approx(expected)
