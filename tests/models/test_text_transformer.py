"""transformers' models as classifiers of token arrays: reference, counts, weights of folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from flower_blsgd.errors import UsageError

from ..log_capture import captured_log

pytest.importorskip("transformers")

from flower_blsgd.models.text_configs import (
    distilbert_config,
    folder_config,
    narrow_distilbert_config,
    with_dropout,
)
from flower_blsgd.models.text_transformer import TextTransformer, load_weights, most_tokens

from .text_folders import VOCABULARY, save_folder, tiny_config, transformers

TOKENS = torch.tensor([[2, 6, 7, 8, 3, -1], [2, 9, 3, -1, -1, -1]], dtype=torch.int32)
KINDS = ("bert", "distilbert", "roberta", "electra", "modernbert")


def fresh(config: Any) -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(config)


def count(config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TextTransformer(config).parameters())


def test_distilbert_has_as_many_parameters_as_published() -> None:
    """Embeddings, six layers, and a head of two linear layers for four classes."""
    width, hidden = 768, 3072
    norm = 2 * width
    embeddings = (30_522 + 512) * width + norm
    layer = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 2 * norm
    head = width * width + width + 4 * width + 4
    assert count(distilbert_config(4)) == embeddings + 6 * layer + head == 66_956_548


def test_narrow_distilbert() -> None:
    """By the same formula with width 64, hidden 256, two layers and 100 words."""
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 2 * 128
    expected = (100 + 512) * 64 + 128 + 2 * layer + 64 * 64 + 64 + 4 * 64 + 4
    assert count(narrow_distilbert_config(4, 100)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_with_its_own_mask(kind: str) -> None:
    model = fresh(tiny_config(kind, num_labels=4)).eval()
    pad = model.network.config.pad_token_id
    filled = TOKENS >= 0
    reference = model.network(
        input_ids=TOKENS.long().masked_fill(~filled, pad), attention_mask=filled.long()
    ).logits
    assert torch.allclose(model(TOKENS), reference, atol=1e-6)
    assert model(TOKENS).shape == (2, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_change_the_logits(kind: str) -> None:
    model = fresh(tiny_config(kind, num_labels=4)).eval()
    logits = model(TOKENS)
    assert torch.allclose(model(TOKENS[1:, :3])[0], logits[1], atol=1e-6)
    assert torch.equal(model(nn.functional.pad(TOKENS, (0, 4), value=-1)), logits)


def test_no_value_is_looked_at_where_the_mask_is_ready() -> None:
    """Else a step could not be recorded as a CUDA graph: on the meta device a look raises."""
    for kind in ("bert", "distilbert", "roberta", "electra"):
        with torch.device("meta"):
            model = TextTransformer(tiny_config(kind, num_labels=4))
            logits = model(torch.zeros(2, 6, dtype=torch.int32))
        assert logits.shape == (2, 4), kind


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the CPU's attention alone
def test_several_models_at_once() -> None:
    """What ``replicas = "batched"`` does."""
    models = [fresh(narrow_distilbert_config(4, VOCABULARY)).eval() for _ in range(2)]
    nn.init.normal_(models[1].network.classifier.weight)
    parameters, buffers = stack_module_state(models)
    stacked = torch.stack([TOKENS, TOKENS.flip(0)])

    def one(own: dict[str, Tensor], buffer: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits: Tensor = functional_call(models[0], (own, buffer), (tokens,))
        return logits

    logits = vmap(one, randomness="different")(parameters, buffers, stacked)
    for k, model in enumerate(models):
        assert torch.allclose(logits[k], model(stacked[k]), atol=1e-5)


def test_bfloat16_on_a_cpu() -> None:
    model = fresh(narrow_distilbert_config(4, VOCABULARY)).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(TOKENS).float(), torch.tensor([1, 2]))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_longest_text() -> None:
    assert most_tokens(distilbert_config(4)) == 512
    assert most_tokens(tiny_config("bert", max_position_embeddings=20)) == 20
    # Positions count from the number of the padding, 1, on.
    assert most_tokens(tiny_config("roberta", max_position_embeddings=20)) == 18
    # No table of positions: what the config says.
    assert most_tokens(tiny_config("modernbert", max_position_embeddings=30)) == 30
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 40}
    assert most_tokens(transformers.XLNetConfig(**sizes)) is None


def test_fresh_weights_are_a_function_of_the_seed() -> None:
    config = narrow_distilbert_config(4, VOCABULARY)
    for one, other in zip(fresh(config).parameters(), fresh(config).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_dropout_of_every_part(kind: str) -> None:
    model = fresh(with_dropout(tiny_config(kind, num_labels=4), kind, 0.25))
    found = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert found == {0.25}
    model = fresh(with_dropout(tiny_config(kind, num_labels=4), kind, "auto"))
    assert 0.25 not in {m.p for m in model.modules() if isinstance(m, nn.Dropout)}


def test_dropout_of_a_model_without_any() -> None:
    config = transformers.PreTrainedConfig()
    with pytest.raises(UsageError, match=r"dropout = 0\.5: model = 'own' .* has none"):
        with_dropout(config, "own", 0.5)


def test_an_architecture_that_does_not_classify_texts() -> None:
    with pytest.raises(UsageError, match=r"model = 'own': .* no classifier of texts for vit") as no:
        TextTransformer(transformers.ViTConfig(), "own")
    assert "name a folder with an encoder of texts" in str(no.value)
    assert "\n" not in str(no.value)
    with pytest.raises(UsageError, match="model = 'own'"):
        most_tokens(transformers.ViTConfig(), "own")


def loaded(folder: Path) -> tuple[TextTransformer, dict[str, Tensor], list[str]]:
    """Return a model with a folder's weights, its weights before, and what the log says."""
    model = fresh(folder_config("own", folder, 4))
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    state = torch.random.get_rng_state()
    with captured_log() as log:
        load_weights(model, folder, "own")
    assert torch.equal(torch.random.get_rng_state(), state)
    return model, before, log.warnings


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_folder_with_head(kind: str, tmp_path: Path) -> None:
    saved = save_folder(tmp_path, kind)
    model, _, told = loaded(tmp_path)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.network.state_dict()[name], tensor), name
    assert told == []


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_head_of_another_size_is_made_anew(kind: str, tmp_path: Path) -> None:
    saved = save_folder(tmp_path, kind, classes=3)
    model, before, told = loaded(tmp_path)
    anew = {"classifier.weight", "classifier.bias"}
    for name, tensor in model.network.state_dict().items():
        wanted = before[name] if name in anew else saved.state_dict()[name]
        assert torch.equal(tensor, wanted), name
    assert told == ["model = 'own' begins with fresh weights in classifier.bias, classifier.weight"]


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_folder_without_head(kind: str, tmp_path: Path) -> None:
    saved = save_folder(tmp_path, kind, head="Model")
    model, before, told = loaded(tmp_path)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.network.state_dict()[f"{kind}.{name}"], tensor), name
    assert torch.equal(model.network.state_dict()["classifier.weight"], before["classifier.weight"])
    (line,) = told
    assert "fresh weights in classifier.bias, classifier.weight" in line


def test_weights_that_the_model_has_no_part_for(tmp_path: Path) -> None:
    saved = save_folder(tmp_path, "distilbert", head="MaskedLM")
    model, _, told = loaded(tmp_path)
    own = model.network.state_dict()
    name = "distilbert.transformer.layer.1.ffn.lin1.weight"
    assert torch.equal(own[name], saved.state_dict()[name])
    (line,) = told
    assert "and has no part for vocab_layer_norm.bias, vocab_layer_norm.weight" in line


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    saved = save_folder(tmp_path)
    saved.half().save_pretrained(tmp_path)
    model, _, _ = loaded(tmp_path)
    for name, tensor in saved.state_dict().items():
        own = model.network.state_dict()[name]
        assert own.dtype == torch.float32
        assert torch.equal(own, tensor.float()), name


def test_weights_of_another_architecture(tmp_path: Path) -> None:
    save_folder(tmp_path, "bert")
    tiny_config("distilbert").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="not those of the distilbert that its config"):
        loaded(tmp_path)


def keep_weights(folder: Path, keep: Callable[[str], bool]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if keep(name)}
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("keep", "count", "one"),
    [
        (lambda name: ".embeddings." not in name, 5, "bert.embeddings.LayerNorm.bias"),
        (lambda name: "layer.1." not in name, 16, "bert.encoder.layer.1.attention.output"),
        (lambda name: "LayerNorm" in name, 27, "bert.embeddings.position_embeddings.weight"),
    ],
)
def test_half_of_the_weights(
    keep: Callable[[str], bool], count: int, one: str, tmp_path: Path
) -> None:
    """Of 5 tensors of the embeddings, 16 of each layer, of which 4 are norms, and a pooler."""
    save_folder(tmp_path, "bert")
    keep_weights(tmp_path, keep)
    with pytest.raises(UsageError, match=r"set pretrained = false for fresh ones") as refused:
        loaded(tmp_path)
    told = str(refused.value)
    assert f"model = 'own': its weights lack {count} of the 39 tensors of the bert" in told
    assert f"such as {one}" in told
    assert "\n" not in told


def test_weights_without_pooler(tmp_path: Path) -> None:
    """Saved by those that were trained on words alone."""
    saved = save_folder(tmp_path, "bert")
    keep_weights(tmp_path, lambda name: "pooler" not in name)
    model, before, told = loaded(tmp_path)
    own = model.network.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(own[name], before[name] if "pooler" in name else tensor), name
    assert told == [
        "model = 'own' begins with fresh weights in bert.pooler.dense.bias, "
        "bert.pooler.dense.weight"
    ]


@pytest.mark.parametrize(
    ("key", "one"),
    [
        ("vocab_size", "bert.embeddings.word_embeddings.weight"),
        ("intermediate_size", "bert.encoder.layer.0.intermediate.dense.bias"),
    ],
)
def test_a_config_of_another_size(key: str, one: str, tmp_path: Path) -> None:
    save_folder(tmp_path, "bert")
    tiny_config("bert", num_labels=4, **{key: 48}).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="or have them in another size") as refused:
        loaded(tmp_path)
    assert f"such as {one}" in str(refused.value)


def test_broken_weights(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UsageError, match="model = 'own': its weights cannot be read") as refused:
        loaded(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_config_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "newer-than-this"}')
    with pytest.raises(UsageError, match=r"cannot use its config\.json") as refused:
        folder_config("own", tmp_path, 4)
    assert "\n" not in str(refused.value)


def test_transformers_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    save_folder(tmp_path, head="MaskedLM")
    capfd.readouterr()
    loaded(tmp_path)
    told = capfd.readouterr()
    assert told.out == ""
    assert "shards" not in told.err
    assert "UNEXPECTED" not in told.err
    assert len(recwarn) == 0
