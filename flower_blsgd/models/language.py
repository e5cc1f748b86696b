"""Causal language models of transformers, optionally with a LoRA adapter of peft."""

import importlib
import importlib.util
import warnings
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError, pip_install
from .pretrained import folder_config, import_transformers, model_folder, quiet, reading


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


def longest_block(config: Any) -> int:
    """Return the maximum number of tokens of a model; 0 if its config does not limit it."""
    return int(getattr(config, "max_position_embeddings", 0) or 0)
