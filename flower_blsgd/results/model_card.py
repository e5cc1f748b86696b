"""Card of a trained model, which the Hugging Face hub shows: ``README.md`` in a results folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..tasks import GIVEN_IN_PYTHON
from .metric import Metric, value_in

_CARD = """\
---
library_name: flower-blsgd
tags: [flower-blsgd, pytorch]
---
# {name}

{lead}

| | |
|---|---|
{rows}

```python
{load}
```
"""

_LOAD = """\
import flower_blsgd

model = flower_blsgd.load("FOLDER")  # the folder of this file; an nn.Module in eval mode"""

_LOAD_WEIGHTS = """\
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"), strict=False)  # your own model"""


def model_card(summary: Mapping[str, Any], config: RunConfig, name: str) -> str:
    """Return the card of a run's model, from the content of ``summary.json``.

    Of paths, only the last part is in it.
    """
    metric = Metric.of(summary, config.validation_share)
    figure = metric.named(value_in(summary))
    task = Path(config.task).name if config.is_script else config.task
    workers = [f"{one['device']} {one['tier']} {one['name']}" for one in summary["workers"]]
    length = f"{summary['samples']:,} samples in {summary['training_seconds']:.1f} s"
    values = {
        "task": task,
        "data": Path(config.data).name,
        "model": Path(config.model).name,
        "figure": figure and f"{metric.split} {figure}",
        "trained on": f"{length}, {summary['rounds']:,} rounds",
        "devices": ", ".join(map(str.strip, workers)),
        "algorithm": config.algorithm,
        **({} if config.is_script else _settings(config)),
        "seed": config.seed,
        "versions": ", ".join(f"{key} {value}" for key, value in summary["versions"].items()),
    }
    rows = [f"| {key} | {_cell(value)} |" for key, value in values.items() if value != ""]
    lead = f"Trained by [flower-blsgd](https://github.com/flower-blsgd/flower-blsgd) on {task}"
    lead += f": {metric.split} {figure}." if figure else "."
    is_named = not config.is_script and config.task != GIVEN_IN_PYTHON
    load = _LOAD if is_named else _LOAD_WEIGHTS
    return _CARD.format(name=name, lead=lead, rows="\n".join(rows), load=load)


def _settings(config: RunConfig) -> dict[str, object]:
    optimizer = f"{config.optimizer}, learning rate {config.learning_rate:g}"
    return {"batch size": config.batch_size, "optimizer": f"{optimizer}, {config.schedule}"}


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
