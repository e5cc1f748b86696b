"""Train a LoRA adapter of a small language model with transformers and PEFT."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import flower_blsgd

LENGTH = 24
TEXTS = [
    f"{a} plus {b} is {a + b}, {b} plus {a} is {a + b}"[:LENGTH].ljust(LENGTH)
    for a in range(20)
    for b in range(20)
]
LETTERS = sorted(set("".join(TEXTS)))


def main() -> None:
    """Train until the run is over."""
    data = torch.tensor([[LETTERS.index(letter) for letter in text] for text in TEXTS])
    torch.manual_seed(0)  # all workers need the same base model
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(LETTERS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    session = flower_blsgd.join(model, optimizer)
    sampler = session.sampler(data)
    loader = DataLoader(data, batch_size=session.batch_size, sampler=sampler)
    session.scheduler(optimizer, lambda progress: 1 - progress)
    if session.is_main:
        every = sum(p.numel() * p.element_size() for p in model.parameters())
        sent = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        print(f"each worker sends {sent:,} bytes per round, not {every:,}")

    while not session.done:
        for batch in loader:
            ids = batch.to(session.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step(samples=len(ids))
            if session.done:
                break
        if session.is_alone:  # one epoch
            break

    if session.is_main:
        with torch.no_grad():
            loss = model(input_ids=data.to(session.device), labels=data.to(session.device)).loss
        print(f"loss {loss.item():.3f}")
        model.save_pretrained("adapter")


if __name__ == "__main__":
    main()
