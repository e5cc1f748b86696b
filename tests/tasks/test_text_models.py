"""Which model and which tokenizer a text task gets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flower_blsgd.errors import UsageError

pytest.importorskip("transformers")

from flower_blsgd.data.tokenizers import vocabulary_of_rows
from flower_blsgd.models.text_encoder import TextEncoder
from flower_blsgd.models.text_transformer import TextTransformer
from flower_blsgd.tasks.text_models import TextModel, TextShape, text_model

from ..models.text_folders import VOCABULARY, save_folder


def chosen(name: str, **settings: Any) -> TextModel:
    return text_model(
        name, 4, **{"max_tokens": 16, "pretrained": False, "dropout": "auto", **settings}
    )


def made(model: TextModel, vocabulary: int = 30) -> Any:
    return model.maker(TextShape(vocabulary, longest=9))()


def test_shape_of_texts() -> None:
    tokens = torch.zeros(2, 9, dtype=torch.int32)
    texts = SimpleNamespace(
        train=(tokens[:, :7], None), test=(tokens, None), facts={"vocabulary": 30}
    )
    # The longest text of both splits.
    assert TextShape.of_texts(texts) == TextShape(30, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("encoder", TextShape(30, 9)), ("distilbert-micro", TextShape(30, 1))],
)
def test_shape_of_weights(name: str, shape: TextShape) -> None:
    assert TextShape.of_weights(made(chosen(name)).state_dict()) == shape


def refusal(name: str, **settings: Any) -> str:
    with pytest.raises(UsageError) as refused:
        chosen(name, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_encoder_is_made_for_its_texts() -> None:
    model = chosen("encoder", pretrained=True)
    network = made(model)
    assert isinstance(network, TextEncoder)
    assert network.words.num_embeddings == 30
    assert network.positions.num_embeddings == 9
    assert model.pretrained is None
    assert model.tokenizer.identity == vocabulary_of_rows().identity


def test_fresh_distilbert_keeps_its_vocabulary() -> None:
    """Rows that fill less of it leave the rest unused, so that the model is the published one."""
    model = chosen("distilbert")
    with torch.device("meta"):
        network = made(model)
    assert isinstance(network, TextTransformer)
    assert sum(p.numel() for p in network.parameters()) == 66_956_548
    assert model.pretrained is None
    assert model.tokenizer.identity == vocabulary_of_rows(marked=True).identity


def test_pretrained_distilbert_comes_from_the_hub() -> None:
    model = chosen("distilbert", pretrained=True)
    assert model.tokenizer.identity == "hub distilbert/distilbert-base-uncased"
    assert model.pretrained is not None


@pytest.mark.parametrize("pretrained", [True, False])
def test_narrow_distilbert_is_always_fresh(pretrained: bool) -> None:
    model = chosen("distilbert-micro", pretrained=pretrained)
    network = made(model)
    assert network.network.config.vocab_size == 30
    assert network.network.config.dim == 64
    assert model.pretrained is None
    assert model.tokenizer.identity == vocabulary_of_rows(marked=True).identity


def test_folder(tmp_path: Path) -> None:
    saved = save_folder(tmp_path)
    model = chosen(str(tmp_path), pretrained=True)
    network = made(model)
    name = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(network.network.state_dict()[name], saved.state_dict()[name])
    assert model.pretrained is not None
    model.pretrained(network)
    assert torch.equal(network.network.state_dict()[name], saved.state_dict()[name])
    tokenizer = model.tokenizer.make([])
    assert tokenizer.encode("the vote").tokens == ["[CLS]", "the", "vote", "[SEP]"]


def test_architecture_of_a_folder_without_its_weights(tmp_path: Path) -> None:
    """Workers need no more; whoever asks for the weights is told that they are a pickle."""
    save_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    model = chosen(str(tmp_path))
    network = made(model)
    assert network.network.config.vocab_size == VOCABULARY
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    assert model.pretrained is not None
    model.pretrained(network)  # looks for no weights
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    model = chosen(str(tmp_path), pretrained=True)
    network = made(model)
    assert model.pretrained is not None
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle"):
        model.pretrained(network)


def test_tokenizer_that_knows_more_than_the_model(tmp_path: Path) -> None:
    save_folder(tmp_path)
    with pytest.raises(UsageError, match="its tokenizer knows 41 tokens, but its model 40"):
        made(chosen(str(tmp_path)), vocabulary=41)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    save_folder(tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    assert "the folder has no tokenizer" in refusal(str(tmp_path))


@pytest.mark.parametrize("name", ["distilbert", "distilbert-micro"])
def test_texts_longer_than_the_model_takes(name: str) -> None:
    assert refusal(name, max_tokens=513) == (
        f"max-tokens = 513: model = {name!r} takes at most 512; set max-tokens = 512"
    )
    chosen(name, max_tokens=512)


@pytest.mark.parametrize("name", ["encoder", "distilbert-micro"])
def test_dropout(name: str) -> None:
    network = made(chosen(name, dropout=0.45))
    assert 0.45 in {m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)}
    network = made(chosen(name))
    assert 0.45 not in {m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)}


def test_dropout_of_the_encoder() -> None:
    """Words and layers are left out at their own rates, unless nothing is to be left out."""
    text = torch.arange(5, 14).unsqueeze(0)

    def kinds(dropout: float | str) -> int:
        network = made(chosen("encoder", dropout=dropout)).train()
        return len({tuple(network(text).flatten().tolist()) for _ in range(8)})

    assert kinds("auto") > 1
    assert kinds(0.2) > 1
    assert kinds(0) == kinds(0.0) == 1


def test_unknown_models() -> None:
    message = refusal("distilbort")
    assert message == (
        "model = 'distilbort' is not known; did you mean distilbert or distilbert-micro?, or a "
        "Hugging Face folder"
    )
    assert "there is no such folder; known: encoder, distilbert" in refusal("./somewhere")
