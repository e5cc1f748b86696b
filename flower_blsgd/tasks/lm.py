"""Language modeling: any causal language model of transformers on text files."""

import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..data.samples import TOKENIZER_FILE, prepared_blocks
from ..data.source import DataSource
from ..errors import UsageError, pip_install
from ..models.pretrained import folder_config, import_transformers, model_folder, quiet, reading
from ..models.text import most_tokens
from ..worker.losses import next_token_loss
from .by_name import Benchmark
from .task import Task
from .texts import tokenizer_source


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Benchmark):
    """Prediction of the next token of texts, in blocks of ``max-tokens`` tokens.

    The model is a causal language model of transformers with its tokenizer, as ``OWNER/NAME`` of
    the HF hub or as a folder. With ``lora-rank``, only an adapter is trained, sent and saved. The
    metric is the perplexity. `source` is used if the setting `data` is empty.
    """

    source: DataSource
    default_model: str = ""

    def task(
        self,
        data: str,
        model: str,
        *,
        again: bool,
        max_tokens: int,
        pretrained: bool,
        lora_rank: int,
        max_samples: int,
        needs_test: bool,
    ) -> Task:
        """Return the task; see `Benchmark`."""
        if not model:
            raise UsageError(
                "model is empty, but task = 'lm' needs a causal language model; name a Hugging "
                "Face folder, or OWNER/NAME of the HF hub"
            )
        config = folder_config(model).get_text_config()
        ends = config.eos_token_id
        if (limit := most_tokens(config)) and max_tokens > limit:
            raise UsageError(
                f"max-tokens = {max_tokens}: model = {model!r} supports at most {limit}; set "
                f"max-tokens = {limit}"
            )
        blocks = prepared_blocks(
            replace(self.source, data=data, max_samples=max_samples, needs_test=needs_test),
            tokenizer_source(model, pretrained=True),
            max_tokens,
            ends[0] if isinstance(ends, list) else ends,
            again,
        )
        if blocks.vocabulary > config.vocab_size:
            raise UsageError(
                f"model = {model!r}: its tokenizer has {blocks.vocabulary:,} tokens, but its model "
                f"{config.vocab_size:,}; they do not match"
            )
        return Task(
            model=functools.partial(LanguageModel, model, lora_rank, pretrained),
            train=(blocks.train[0], blocks.train[0]),
            test=(blocks.test[0], blocks.test[0]),
            loss=next_token_loss,
            metric=next_token_loss,
            metric_mode="min",
            metric_name="perplexity",
            metric_from_sums=_perplexity,
            data_fingerprint=blocks.fingerprint,
            assets={TOKENIZER_FILE: blocks.folder / TOKENIZER_FILE},
            prepared=blocks,
        )

    def check_weights(self, model: str) -> None:
        """Find the published weights of a model; see `Benchmark`."""
        if model:
            model_folder(model)

    def saved_model(
        self, model: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a new model with the adapter of saved weights, if they have one."""
        ranks = [len(tensor) for name, tensor in tensors.items() if ".lora_A." in name]
        return LanguageModel(model, max(ranks, default=0), pretrained=bool(ranks))


BENCHMARKS: Mapping[str, Benchmark] = {
    "lm": LanguageTask(source=DataSource(name="lm", noun="texts")),
}


def _perplexity(sums: Mapping[str, float], num_samples: int) -> float:
    """Return the perplexity: all blocks have the same number of tokens."""
    return math.exp(min(sums["perplexity"] / num_samples, 700.0))


# --- the model


class LanguageModel(nn.Module):
    """Causal language model for blocks of tokens; `network` is a model of transformers or peft.

    ``model.network.save_pretrained(folder)`` saves it as a Hugging Face folder, or its adapter.
    `name` is such a folder, or ``OWNER/NAME`` of the HF hub. `lora_rank` is that of a LoRA adapter
    for all linear layers, whose weights alone are trained; 0: all weights are trained. `pretrained`
    loads the published weights, in their own dtype. UsageError if the folder has no causal language
    model, peft is not installed, or an adapter is wanted without published weights.
    """

    def __init__(self, name: str, lora_rank: int = 0, pretrained: bool = True) -> None:
        super().__init__()
        auto = import_transformers(name).AutoModelForCausalLM
        if lora_rank and not pretrained:
            raise UsageError(
                f"lora-rank = {lora_rank} needs published weights; set pretrained = true, or "
                "lora-rank = 0"
            )
        with reading(f"model = {name!r}: transformers cannot load a causal language model"):
            if pretrained:
                self.network: Any = auto.from_pretrained(
                    model_folder(name),
                    dtype="auto",
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
            else:
                config = folder_config(name)
                self.network = auto.from_config(config, trust_remote_code=False)
        if lora_rank:
            self.network = _with_adapter(self.network, lora_rank)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, shape (batch_size, length, vocabulary)."""
        logits: Tensor = self.network(input_ids=tokens.long(), use_cache=False).logits
        return logits


def _with_adapter(network: Any, rank: int) -> Any:
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"lora-rank = {rank} needs peft; {pip_install('lora')}")
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with quiet(), warnings.catch_warnings(action="ignore"):
        return peft.get_peft_model(network, config)
