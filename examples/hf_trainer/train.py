"""Fine-tune a small encoder to tell good from bad, with the Trainer of transformers."""

import itertools
from typing import Any

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from flower_blsgd.integrations.transformers import BlsgdCallback

TEXTS = [
    (f"{start} the {what} was {how} {word}", label)
    for label, words in enumerate(("awful bad boring poor", "good great lovely superb"))
    for start, what, how, word in itertools.product(
        ("honestly", "today", "again", "we think", "they said"),
        ("film", "meal", "room", "book", "service"),
        ("really", "quite", "so", "not only"),
        words.split(),
    )
]
WORDS = sorted({word for text, _ in TEXTS for word in text.split()})
LENGTH = 9


def encoded(text: str, label: int) -> dict[str, Any]:
    """Return a text as numbers: 1 begins it, 0 fills it up, the words follow from 2."""
    ids = [1, *(2 + WORDS.index(word) for word in text.split())]
    empty = LENGTH - len(ids)
    return {
        "input_ids": ids + [0] * empty,
        "attention_mask": [1] * len(ids) + [0] * empty,
        "labels": label,
    }


def main() -> None:
    """Train, evaluate and save."""
    samples = [encoded(text, label) for text, label in TEXTS]
    train, test = [s for i, s in enumerate(samples) if i % 5], samples[::5]
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=2 + len(WORDS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            "out",
            num_train_epochs=4,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            warmup_steps=0.1,
            lr_scheduler_type="linear",
            logging_steps=20,
            eval_strategy="epoch",
            metric_for_best_model="accuracy",
            save_strategy="no",
        ),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
    )
    trainer.add_callback(BlsgdCallback(trainer))
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"accuracy {accuracy:.1%} after {trainer.state.global_step} steps")
    trainer.save_model("out/model")


if __name__ == "__main__":
    main()
