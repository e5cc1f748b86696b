"""Language modeling: any causal language model of transformers on text files."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..data.samples import TOKENIZER_FILE, prepared_blocks
from ..data.source import DataSource
from ..errors import UsageError
from ..models.language import LanguageModel, longest_block
from ..models.pretrained import folder_config, model_folder
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
        config = folder_config(model)
        if (limit := longest_block(config)) and max_tokens > limit:
            raise UsageError(
                f"max-tokens = {max_tokens}: model = {model!r} supports at most {limit}; set "
                f"max-tokens = {limit}"
            )
        blocks = prepared_blocks(
            replace(self.source, data=data, max_samples=max_samples, needs_test=needs_test),
            tokenizer_source(model, pretrained=True),
            max_tokens,
            config.eos_token_id,
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
