"""The small encoder: padding changes nothing, words are left out in training only."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from flower_blsgd.models.text_encoder import TextEncoder

TOKENS = torch.tensor([[5, 6, 7, -1, -1], [8, 9, -1, -1, -1]], dtype=torch.int32)


NO_DROPOUT = {"dropout": 0.0, "word_dropout": 0.0, "layer_dropout": 0.0}


def encoder(**settings: float) -> TextEncoder:
    """Return one whose layer does something already."""
    torch.manual_seed(0)
    model = TextEncoder(12, 4, 6, **({"width": 16, "heads": 2} | settings))  # type: ignore[arg-type]
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


def test_longer_texts_are_cut() -> None:
    model = encoder().eval()
    tokens = torch.arange(9).unsqueeze(0)
    assert torch.equal(model(tokens), model(tokens[:, :6]))


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
    assert model.positions is not None
    vectors = model.words.weight[5:8] + model.positions.weight[:3]
    expected = model.linear(16 * vectors.mean(dim=0))
    assert torch.allclose(model(TOKENS[:1, :3])[0], expected, atol=1e-6)


def test_gradient_reaches_every_parameter() -> None:
    model = encoder(**NO_DROPOUT)
    nn.functional.cross_entropy(model(TOKENS), torch.tensor([1, 2])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_words_that_do_not_occur_get_no_gradient() -> None:
    model = encoder(**NO_DROPOUT)
    model(TOKENS).sum().backward()
    assert model.words.weight.grad is not None
    used = model.words.weight.grad.abs().sum(dim=1) > 0
    assert set(used.nonzero().flatten().tolist()) == {5, 6, 7, 8, 9}


def test_order_of_the_words_counts() -> None:
    model = encoder().eval()
    one, other = model(TOKENS[:1, :3]), model(TOKENS[:1, :3].flip(1))
    assert not torch.allclose(one, other, atol=1e-7)


def test_bag_of_words_alone() -> None:
    model = encoder(layers=0).eval()
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"words", "linear"}
    one, other = model(TOKENS[:1, :3]), model(TOKENS[:1, :3].flip(1))
    assert torch.allclose(one, other, atol=1e-6)
    assert model(torch.full((1, 3), -1)).isfinite().all()


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


def test_number_of_parameters() -> None:
    """Embeddings of 12 words and 6 places; a layer of width 16 and hidden 32; head."""
    attention, feed_forward, norms = 4 * 16 * 16 + 4 * 16, 2 * 16 * 32 + 32 + 16, 2 * 2 * 16
    expected = (12 + 6) * 16 + attention + feed_forward + norms + 16 * 4 + 4
    assert sum(p.numel() for p in encoder().parameters()) == expected


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the CPU's attention alone
def test_several_models_at_once() -> None:
    """What ``replicas = "batched"`` does; in eval mode each gets what it gets alone."""
    models = [encoder().eval(), encoder().eval()]
    nn.init.normal_(models[1].linear.weight)
    parameters, buffers = stack_module_state(models)
    stacked = torch.stack([TOKENS, TOKENS.flip(0)])

    def one(own: dict[str, torch.Tensor], buffer: dict[str, torch.Tensor], tokens: torch.Tensor):  # type: ignore[no-untyped-def]
        return functional_call(models[0], (own, buffer), (tokens,))

    logits = vmap(one, randomness="different")(parameters, buffers, stacked)
    for k, model in enumerate(models):
        assert torch.allclose(logits[k], model(stacked[k]), atol=1e-5)


def test_bfloat16_on_a_cpu() -> None:
    model = encoder()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(TOKENS)
        loss = nn.functional.cross_entropy(logits.float(), torch.tensor([1, 2]))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_no_value_is_looked_at_in_training() -> None:
    """Else a step could not be recorded as a CUDA graph: on the meta device a look raises."""
    with torch.device("meta"):
        model = TextEncoder(12, 4, 6, width=16)
        assert model(torch.zeros(2, 6, dtype=torch.int32)).shape == (2, 4)
