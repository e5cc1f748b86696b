"""Tokenizers of folders: whose files they are, and what becomes of them."""

import contextlib
import json
from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError

pytest.importorskip("transformers")

from flower_blsgd.models.text_tokenizer import folder_tokenizer, tokenizer_state

from .text_folders import save_folder


def test_tokenizer_json(tmp_path: Path) -> None:
    save_folder(tmp_path)
    tokenizer = folder_tokenizer("own", tmp_path)
    encoded = tokenizer.encode("The vote, zebra")
    assert encoded.tokens == ["[CLS]", "the", "vote", "[UNK]", "[UNK]", "[SEP]"]


def test_vocabulary_alone(tmp_path: Path) -> None:
    """As BERT's folders once were: a list of word pieces."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "vote", "##s", "the"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    encoded = folder_tokenizer("own", tmp_path).encode("The votes")
    assert encoded.ids == [2, 7, 5, 6, 3]


def test_state_is_that_of_the_content(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        save_folder(folder)
    state = tokenizer_state("own", one)
    assert tokenizer_state("own", other) == state
    (other / "model.safetensors").unlink()
    assert tokenizer_state("own", other) == state
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["normalizer"]["lowercase"] = False
    (other / "tokenizer.json").write_text(json.dumps(settings))
    assert tokenizer_state("own", other) != state


def test_no_tokenizer(tmp_path: Path) -> None:
    save_folder(tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UsageError, match="the folder has no tokenizer; save it there"):
        tokenizer_state("own", tmp_path)


def test_broken_tokenizer(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="model = 'own': its tokenizer cannot be read") as refused:
        folder_tokenizer("own", tmp_path)
    assert "\n" not in str(refused.value)


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    save_folder(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "own_code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own:\n    pass\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own_code.Own", "own_code.Own"]}
    settings["tokenizer_class"] = "Own"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(UsageError):
        folder_tokenizer("own", tmp_path)
    assert not ran.exists()
