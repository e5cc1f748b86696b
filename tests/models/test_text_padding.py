"""Whether a model reads a text alike alone and beside a longer one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_blsgd.errors import UsageError

pytest.importorskip("transformers")

from flower_blsgd.models.text_padding import check_padding
from flower_blsgd.models.text_transformer import TextTransformer

from .text_folders import tiny_config, transformers

SIZES = {"vocab_size": 40, "num_labels": 4}
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, **SIZES}
BART: dict[str, Any] = {
    "d_model": 16,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    **SIZES,
}
GPT2: dict[str, Any] = {
    **{"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1},
    **SIZES,
}


def fresh(config: Any) -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(config)


def refusal(config: Any) -> str:
    with pytest.raises(UsageError) as refused:
        check_padding(fresh(config), "own")
    assert str(refused.value).startswith("model = 'own': ")
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "electra", "modernbert"])
def test_encoders(kind: str) -> None:
    check_padding(fresh(tiny_config(kind, num_labels=4)), "own")


def test_texts_end_as_the_model_expects() -> None:
    """BART reads what it says of a text at its last token, which must be the one for the end."""
    check_padding(fresh(transformers.BartConfig(**BART)), "own")


def test_a_model_that_reads_its_padding() -> None:
    assert "what xlnet says of a text changes" in refusal(transformers.XLNetConfig(**XLNET))


def test_a_model_without_padding() -> None:
    assert "gpt2 cannot read texts of different length" in refusal(transformers.GPT2Config(**GPT2))


class Numbers(nn.Module):
    """Says nothing that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Module()
        self.network.config = tiny_config("bert")  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.full((len(tokens), 4), float("nan"))


def test_what_is_no_number_is_not_equal() -> None:
    with pytest.raises(UsageError, match="changes with the longer text"):
        check_padding(Numbers(), "own")  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [False, True])
def test_model_and_random_numbers_are_as_before(training: bool) -> None:
    model = fresh(tiny_config("bert", num_labels=4)).train(training)
    state = torch.random.get_rng_state()
    check_padding(model, "own")
    assert model.training == training
    assert torch.equal(torch.random.get_rng_state(), state)
