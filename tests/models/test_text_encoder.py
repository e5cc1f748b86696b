"""The small encoder: padding changes nothing, words are left out in training only."""

import pytest
import torch
from torch import nn

from flower_blsgd.models.text_encoder import TextEncoder, leave_out_words

TOKENS = torch.tensor([[5, 6, 7, -1, -1], [8, 9, -1, -1, -1]], dtype=torch.int32)


NO_DROPOUT = {"dropout": 0.0, "word_dropout": 0.0, "layer_dropout": 0.0}


def encoder(**settings: float) -> TextEncoder:
    """Return one whose layer does something already."""
    torch.manual_seed(0)
    model = TextEncoder(12, 4, 6, **({"width": 16} | settings))  # type: ignore[arg-type]
    for name, parameter in model.layers.named_parameters():
        if name.endswith(("out_proj.weight", "linear2.weight")):
            nn.init.normal_(parameter, std=0.1)
    return model


def test_padding_does_not_change_the_logits() -> None:
    model = encoder().eval()
    logits = model(TOKENS)
    assert logits.shape == (2, 4)
    alone = model(TOKENS[1:, :2])
    wider = model(nn.functional.pad(TOKENS, (0, 1), value=-1))
    assert torch.allclose(alone[0], logits[1], atol=1e-6)
    assert torch.equal(wider, logits)


@pytest.mark.parametrize("training", [False, True])
def test_a_text_without_tokens(training: bool) -> None:
    model = encoder(**NO_DROPOUT).train(training)
    tokens = torch.cat([TOKENS, torch.full((1, 5), -1, dtype=torch.int32)])
    with torch.no_grad():  # torch takes its fast path
        logits = model(tokens)
        assert torch.allclose(logits[:2], model(TOKENS), atol=1e-6)
    assert torch.equal(logits[2], model.linear.bias)


def test_begins_as_a_linear_model_on_a_bag_of_words() -> None:
    torch.manual_seed(0)
    model = TextEncoder(12, 4, 6, width=16).eval()
    vectors = model.words.weight[5:8] + model.positions.weight[:3]
    expected = model.linear(16 * vectors.mean(dim=0))
    assert torch.allclose(model(TOKENS[:1, :3])[0], expected, atol=1e-6)


@pytest.mark.parametrize("setting", NO_DROPOUT)
def test_dropout_in_training_only(setting: str) -> None:
    model = encoder(**{**NO_DROPOUT, setting: 0.5})
    assert len({tuple(model(TOKENS).flatten().tolist()) for _ in range(8)}) > 1
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))


def test_a_layer_that_is_left_out_counts_twice_elsewhere() -> None:
    """With half of them left out, what a layer adds is doubled where it stays."""
    model = encoder(**{**NO_DROPOUT, "layer_dropout": 0.5})
    layer = model.layers[0]
    inputs, empty = torch.randn(64, 3, 16), torch.zeros(64, 3, dtype=torch.bool)
    added = (layer(inputs, empty) - inputs).detach()
    whole = (layer.eval()(inputs, empty) - inputs).detach()
    kept = added.abs().sum(dim=(1, 2)) > 0
    assert 10 < kept.sum() < 54
    assert torch.allclose(added[kept], 2 * whole[kept], atol=1e-5)


def test_no_value_is_read_in_training() -> None:
    """Else a step could not be captured as a CUDA graph: on the meta device a read raises."""
    with torch.device("meta"):
        model = TextEncoder(12, 4, 6, width=16)
        assert model(torch.zeros(2, 6, dtype=torch.int32)).shape == (2, 4)


def test_words_that_stay_keep_their_order_and_position() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(1, 41, dtype=torch.int32).repeat(50, 1)
    tokens[1:, 30:] = -1
    left, positions = leave_out_words(tokens, 0.6)
    assert left.dtype == torch.int32
    for text, position, before in zip(left, positions, tokens, strict=True):
        count = int((text >= 0).sum())
        assert 0 < count < 30
        assert (text[count:] == -1).all()
        assert text[0] == 1  # the first word stays
        assert torch.equal(text[:count], before[position[:count]])
        assert (position[:count].diff() > 0).all()
    shares = (left >= 0).sum() / (tokens >= 0).sum()
    assert 0.37 < shares < 0.47  # 0.4 of all, and the first of each
    left, positions = leave_out_words(TOKENS, 0.0)
    assert torch.equal(left, TOKENS)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert leave_out_words(torch.full((2, 3), -1), 0.5)[0].tolist() == [[-1] * 3] * 2
