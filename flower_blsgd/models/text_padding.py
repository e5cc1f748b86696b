"""Whether a model reads a text alike alone and beside a longer one, tried on two texts."""

import torch
from torch import Tensor

from ..errors import UsageError
from .text_configs import brief
from .text_transformer import TextTransformer

_SHORT, _LONG = 4, 9
_MARKS = ("pad", "unk", "bos", "cls", "mask", "decoder_start")
_LAST = ("eos", "sep")
_ROUNDING = 1e-3
"""Of the largest logit; float32 and bfloat16 kernels that sum in another order stay below it."""


def check_padding(model: TextTransformer, name: str) -> None:
    """Refuse a model whose logits of a text depend on the text beside it in a batch.

    Each would learn, and be tested, on what the batch's longest text happens to be. Torch's
    random numbers are as before.

    Parameters
    ----------
    model : TextTransformer
        With the weights that it begins with.
    name : str
        What the user calls it.

    Raises
    ------
    UsageError
        If they do, or the model cannot read a batch of two texts.
    """
    tokens = _two_texts(model.network.config)
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            beside, alone = model(tokens)[0], model(tokens[:1, :_SHORT])[0]
    except Exception as error:
        raise UsageError(
            f"model = {name!r}: {model.network.config.model_type} cannot read texts of different "
            f"length at once ({brief(error)}); use an encoder such as BERT"
        ) from None
    finally:
        model.train(training)
    if not (beside - alone).abs().max() <= _ROUNDING * alone.abs().max():
        raise UsageError(
            f"model = {name!r}: what {model.network.config.model_type} says of a text changes with "
            "the longer text beside it in a batch, so it cannot be trained here; use an encoder "
            "such as BERT"
        )


def _two_texts(config: object) -> Tensor:
    """Return a short and a long text of shape (2, 9), as the model's tokenizer would end them."""
    marks = {getattr(config, f"{mark}_token_id", None) for mark in (*_MARKS, *_LAST)}
    words = [number for number in range(_LONG + len(marks)) if number not in marks][:_LONG]
    size = int(getattr(config, "vocab_size", _LONG))
    short, long = (torch.tensor(words[:count]) % size for count in (_SHORT, _LONG))
    last = next(
        (n for mark in _LAST if (n := getattr(config, f"{mark}_token_id", None)) is not None), None
    )
    if last is not None:
        short[-1] = long[-1] = last
    return torch.stack([torch.nn.functional.pad(short, (0, _LONG - _SHORT), value=-1), long])
