"""Hugging Face folders of tiny encoders for tests."""

from pathlib import Path
from typing import Any

import torch

from flower_blsgd.data.tokenizers import vocabulary_of_rows
from flower_blsgd.models.hugging_face import import_transformers, quiet

transformers = import_transformers("test", "text")

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
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
        make = transformers.DistilBertConfig
    else:
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        kinds = {"bert": "BertConfig", "roberta": "RobertaConfig", "electra": "ElectraConfig"}
        make = getattr(transformers, {**kinds, "modernbert": "ModernBertConfig"}[kind])
        if kind == "modernbert":
            sizes |= {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    return make(**{"vocab_size": VOCABULARY, **sizes, **changes})


def save_folder(
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
