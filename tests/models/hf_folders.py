"""Hugging Face folders of tiny models for tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flower_blsgd.data.samples import vocabulary_of_rows
from flower_blsgd.models.pretrained import import_transformers, quiet

transformers = import_transformers("test")

TEXTS = [
    "the vote in the capital",
    "the match in the rain",
    "a bank in the rain",
    "a chip in a phone vote match bank chip phone capital",
]
VOCABULARY = 40
"""Of the models; their tokenizer knows fewer."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return a BERT-like or DistilBERT-like config of width 16."""
    sizes = {"vocab_size": VOCABULARY}
    if kind == "distilbert":
        sizes |= {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    else:
        sizes |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 32, "embedding_size": 16}
    if kind == "modernbert":
        sizes |= {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    return transformers.AutoConfig.for_model(kind, **{**sizes, **changes})


def save_text_model(
    folder: Path, kind: str = "bert", head: str = "SequenceClassification", classes: int = 4
) -> Any:
    """Save a model with random weights, and a tokenizer; return the model.

    `head` is the end of its class's name, such as ``"MaskedLM"``; ``"Model"`` has none.
    """
    name = {"bert": "Bert", "distilbert": "DistilBert"}[kind]
    make = getattr(transformers, f"{name}Model" if head == "Model" else f"{name}For{head}")
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(7)
        model = make(tiny_config(kind, num_labels=classes))
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=vocabulary_of_rows(marked=True).make(TEXTS),
            pad_token="[PAD]",
            unk_token="[UNK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
        ).save_pretrained(folder)
    return model


def save_model(folder: Path, model: Any) -> str:
    """Save a model of transformers and return its folder."""
    with quiet():
        model.save_pretrained(folder)
    return str(folder)


def change_config(folder: Path, **changes: Any) -> None:
    """Rewrite keys of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def keep_weights(folder: Path, keep: Callable[[str], bool]) -> None:
    """Drop tensors from a folder's weights."""
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if keep(name)}
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
