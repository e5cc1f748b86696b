"""Classifiers of token arrays: padding changes nothing, words are left out in training only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from flower_blsgd.models.text import (
    ENCODERS,
    TextEncoder,
    TextTransformer,
    most_tokens,
    text_config,
    without_empty_columns,
)

from ..refusal import refusal
from .hf_folders import change_config, tiny_config, transformers

SHORT = torch.tensor([[5, 6, 7, -1, -1], [8, 9, -1, -1, -1]], dtype=torch.int32)
TOKENS = torch.tensor([[2, 6, 7, 8, 3, -1], [2, 9, 3, -1, -1, -1]], dtype=torch.int32)


def test_texts_as_wide_as_the_longest() -> None:
    cut = without_empty_columns(SHORT)
    assert cut.tolist() == [[5, 6, 7], [8, 9, -1]]
    assert cut.data_ptr() == SHORT.data_ptr()
    assert without_empty_columns(cut).shape == (2, 3)
    assert without_empty_columns(torch.full((2, 3), -1)).tolist() == [[-1], [-1]]


def test_no_value_is_read() -> None:
    """Otherwise a step could not be a CUDA graph. On the meta device, a read raises."""
    tokens = torch.zeros(2, 6, dtype=torch.int32, device="meta")
    with torch.device("meta"):
        assert TextEncoder(12, 4, 6)(tokens).shape == (2, 4)
        for kind in ("bert", "distilbert", "roberta", "electra"):
            model = TextTransformer(tiny_config(kind, num_labels=4))
            assert model(tokens).shape == (2, 4), kind


# the small encoder

NO_DROPOUT = {"dropout": 0.0, "word_dropout": 0.0, "layer_dropout": 0.0}


def encoder(**settings: float) -> TextEncoder:
    """Return one whose layer does something already."""
    torch.manual_seed(0)
    model = TextEncoder(12, 4, 6, **settings)
    for name, parameter in model.layers.named_parameters():
        if name.endswith(("out_proj.weight", "linear2.weight")):
            nn.init.normal_(parameter, std=0.1)
    return model


def test_padding_does_not_change_the_logits() -> None:
    model = encoder().eval()
    logits = model(SHORT)
    assert logits.shape == (2, 4)
    alone = model(SHORT[1:, :2])
    wider = model(nn.functional.pad(SHORT, (0, 1), value=-1))
    assert torch.allclose(alone[0], logits[1], atol=1e-6)
    assert torch.equal(wider, logits)


@pytest.mark.parametrize("training", [False, True])
def test_a_text_without_tokens(training: bool) -> None:
    model = encoder(**NO_DROPOUT).train(training)
    tokens = torch.cat([SHORT, torch.full((1, 5), -1, dtype=torch.int32)])
    with torch.no_grad():  # torch takes its fast path
        logits = model(tokens)
        assert torch.allclose(logits[:2], model(SHORT), atol=1e-6)
    assert torch.equal(logits[2], model.linear.bias)


def test_begins_as_a_linear_model_on_a_bag_of_words() -> None:
    torch.manual_seed(0)
    model = TextEncoder(12, 4, 6).eval()
    vectors = model.words.weight[5:8] + model.positions.weight[:3]
    expected = model.linear(16 * vectors.mean(dim=0))
    assert torch.allclose(model(SHORT[:1, :3])[0], expected, atol=1e-6)


@pytest.mark.parametrize("setting", NO_DROPOUT)
def test_dropout_in_training_only(setting: str) -> None:
    model = encoder(**{**NO_DROPOUT, setting: 0.5})
    assert len({tuple(model(SHORT).flatten().tolist()) for _ in range(8)}) > 1
    model.eval()
    assert torch.equal(model(SHORT), model(SHORT))


def test_a_layer_that_is_left_out_counts_twice_elsewhere() -> None:
    """With half of them left out, what a layer adds is doubled where it stays."""
    model = encoder(**{**NO_DROPOUT, "layer_dropout": 0.5})
    layer = model.layers[0]
    inputs, empty = torch.randn(64, 3, 64), torch.zeros(64, 3, dtype=torch.bool)
    added = (layer(inputs, empty) - inputs).detach()
    whole = (layer.eval()(inputs, empty) - inputs).detach()
    kept = added.abs().sum(dim=(1, 2)) > 0
    assert 10 < kept.sum() < 54
    assert torch.allclose(added[kept], 2 * whole[kept], atol=1e-5)


def test_words_that_stay_keep_their_order_and_position() -> None:
    torch.manual_seed(0)
    model = TextEncoder(60, 4, 40)  # leaves 0.6 of the words out
    seen: list[torch.Tensor] = []
    for layer in (model.words, model.positions):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens = torch.arange(1, 41, dtype=torch.int32).repeat(50, 1)
    tokens[1:, 30:] = -1
    model(tokens)
    words, positions = seen  # 0 where a text has no more words
    assert words.shape[1] < 30
    for text, position, before in zip(words, positions, tokens, strict=True):
        count = int((text > 0).sum())
        assert not text[count:].any()
        assert text[0] == 1  # the first word stays
        assert torch.equal(text[:count], before[position[:count]])
        assert (position[:count].diff() > 0).all()
    share = float((words > 0).sum() / (tokens > 0).sum())
    assert 0.37 < share < 0.47  # 0.4 of all, and the first of each


# encoders of transformers


def fresh(config: Any) -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(config)


@pytest.mark.parametrize("kind", sorted(ENCODERS))
def test_logits_are_those_of_transformers_whatever_the_padding(kind: str) -> None:
    model = fresh(tiny_config(kind, num_labels=4)).eval()
    pad = model.network.config.pad_token_id
    filled = TOKENS >= 0
    reference = model.network(
        input_ids=TOKENS.long().masked_fill(~filled, pad), attention_mask=filled.long()
    ).logits
    logits = model(TOKENS)
    assert logits.shape == (2, 4)
    assert torch.allclose(logits, reference, atol=1e-6)
    assert torch.allclose(model(TOKENS[1:, :3])[0], logits[1], atol=1e-6)
    assert torch.equal(model(nn.functional.pad(TOKENS, (0, 4), value=-1)), logits)


def test_longest_text() -> None:
    assert most_tokens(text_config("distilbert", 4)) == 512
    assert most_tokens(tiny_config("bert", max_position_embeddings=20)) == 20
    assert most_tokens(transformers.BloomConfig()) == 0  # without a limit
    # Positions count from the number of the padding, 1, on.
    config = tiny_config("roberta", max_position_embeddings=20)
    assert most_tokens(config) == 18
    model = fresh(config).eval()
    model(torch.full((1, 18), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, 19), 5))


def test_dropout_of_every_part(tmp_path: Path) -> None:
    tiny_config("bert").save_pretrained(tmp_path)
    for name in ("distilbert-micro", str(tmp_path)):
        found = []
        for dropout in (0.25, "auto"):
            model = fresh(text_config(name, 4, dropout))
            found.append({m.p for m in model.modules() if isinstance(m, nn.Dropout)})
        assert found[0] == {0.25}
        assert 0.25 not in found[1]


def test_refused_folders(tmp_path: Path) -> None:
    tiny_config("bert").save_pretrained(tmp_path)
    change_config(tmp_path, model_type="newer-than-this")
    assert "transformers cannot use its config.json" in refusal(text_config, str(tmp_path), 4)
    transformers.XLNetConfig().save_pretrained(tmp_path)
    message = refusal(text_config, str(tmp_path), 4)
    assert f"model = {str(tmp_path)!r}: its config.json has model_type 'xlnet', but a t" in message
