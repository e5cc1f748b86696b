"""transformers' models as classifiers of token arrays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flower_blsgd.errors import UsageError

pytest.importorskip("transformers")

from flower_blsgd.models.text_transformer import (
    TextTransformer,
    check_padding,
    distilbert_config,
    folder_config,
    most_tokens,
    with_dropout,
)

from ..refusal import refusal
from .hf_folders import VOCABULARY, tiny_config, transformers

TOKENS = torch.tensor([[2, 6, 7, 8, 3, -1], [2, 9, 3, -1, -1, -1]], dtype=torch.int32)
KINDS = ("bert", "distilbert", "roberta", "electra", "modernbert")


def fresh(config: Any) -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(config)


def micro(vocabulary: int = VOCABULARY) -> Any:
    return distilbert_config("distilbert-micro", 4, vocab_size=vocabulary)


def count(config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TextTransformer(config).parameters())


def test_parameters() -> None:
    """Of the published model: 66,956,548."""
    assert count(distilbert_config("distilbert", 4)) == 66_956_548
    # Embeddings, two layers with norms, and a head of two linear layers for four classes.
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 4 * 64
    assert count(micro(100)) == (100 + 512 + 2) * 64 + 2 * layer + 64 * 64 + 64 + 4 * 64 + 4


@pytest.mark.parametrize("kind", KINDS)
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
    check_padding(model, "own")


def test_no_value_is_read_where_the_mask_is_ready() -> None:
    """Else a step could not be captured as a CUDA graph: on the meta device a read raises."""
    for kind in ("bert", "distilbert", "roberta", "electra"):
        with torch.device("meta"):
            model = TextTransformer(tiny_config(kind, num_labels=4))
            logits = model(torch.zeros(2, 6, dtype=torch.int32))
        assert logits.shape == (2, 4), kind


def test_longest_text() -> None:
    assert most_tokens(distilbert_config("distilbert", 4)) == 512
    assert most_tokens(tiny_config("bert", max_position_embeddings=20)) == 20
    # Positions count from the number of the padding, 1, on.
    assert most_tokens(tiny_config("roberta", max_position_embeddings=20)) == 18
    # No table of positions: what the config says.
    assert most_tokens(tiny_config("modernbert", max_position_embeddings=30)) == 30
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 40}
    assert most_tokens(transformers.XLNetConfig(**sizes)) is None


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_dropout_of_every_part(kind: str) -> None:
    model = fresh(with_dropout(tiny_config(kind, num_labels=4), kind, 0.25))
    found = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert found == {0.25}
    model = fresh(with_dropout(tiny_config(kind, num_labels=4), kind, "auto"))
    assert 0.25 not in {m.p for m in model.modules() if isinstance(m, nn.Dropout)}


def test_refused_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "newer-than-this"}')
    for call, message in (
        (
            lambda: with_dropout(transformers.PreTrainedConfig(), "own", 0.5),
            r"^dropout = 0\.5: model = 'own' .* has none",
        ),
        (
            lambda: TextTransformer(transformers.ViTConfig(), "own"),
            r"^model = 'own': .* no classifier of texts for vit.*name a folder with an encoder of",
        ),
        (lambda: most_tokens(transformers.ViTConfig(), "own"), "^model = 'own'"),
        (lambda: folder_config("own", tmp_path, 4), r"^model = 'own': .* cannot use its config\."),
    ):
        with pytest.raises(UsageError, match=message) as refused:
            call()
        assert "\n" not in str(refused.value)


# padding

SIZES = {"vocab_size": 40, "num_labels": 4}
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, **SIZES}
BART: dict[str, Any] = {
    "d_model": 16,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    **SIZES,
}


def test_tried_texts_end_as_the_model_expects() -> None:
    """BART reads a text at its last token, which must be the one for the end."""
    model = fresh(transformers.BartConfig(**BART)).train()
    state = torch.random.get_rng_state()
    check_padding(model, "own")
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_models_that_depend_on_padding_are_refused() -> None:
    message = refusal(check_padding, fresh(transformers.XLNetConfig(**XLNET)), "own")
    assert message.startswith("model = 'own': what xlnet says of a text changes")
