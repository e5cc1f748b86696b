"""Columns that no text fills are dropped where a value may be looked at; words are left out."""

import pytest
import torch
from torch.func import vmap

from flower_blsgd.models import text_tokens
from flower_blsgd.models.text_tokens import leave_out_words, without_empty_columns

TOKENS = torch.tensor([[5, 6, -1, -1], [7, 0, 8, -1]], dtype=torch.int32)


def test_as_wide_as_the_longest_text() -> None:
    cut = without_empty_columns(TOKENS)
    assert cut.tolist() == [[5, 6, -1], [7, 0, 8]]
    assert cut.data_ptr() == TOKENS.data_ptr()
    assert without_empty_columns(cut).shape == (2, 3)


def test_one_column_stays() -> None:
    assert without_empty_columns(torch.full((2, 3), -1)).tolist() == [[-1], [-1]]


def test_not_inside_vmap() -> None:
    stacked = torch.stack([TOKENS, TOKENS])
    assert vmap(without_empty_columns)(stacked).shape == (2, 2, 4)


def test_not_while_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert without_empty_columns(TOKENS) is TOKENS


class OnCuda:
    """Stands for a tensor on a GPU; a look at a value would end a recording."""

    is_cuda = True

    def __ge__(self, other: int) -> torch.Tensor:
        raise AssertionError("looked at")


def test_not_while_a_cuda_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tokens = OnCuda()
    assert text_tokens.without_empty_columns(tokens) is tokens  # type: ignore[arg-type,comparison-overlap]


class Forbidden:
    """Stands for a tensor on a GPU while torch forbids to wait for it."""

    is_cuda = True

    def __ge__(self, other: int) -> torch.Tensor:
        raise RuntimeError("called a synchronizing CUDA operation")


def test_not_where_waiting_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tokens = Forbidden()
    assert text_tokens.without_empty_columns(tokens) is tokens  # type: ignore[arg-type,comparison-overlap]


def test_words_that_stay_keep_their_order_and_place() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(1, 41, dtype=torch.int32).repeat(50, 1)
    tokens[1:, 30:] = -1
    left, places = leave_out_words(tokens, 0.6)
    assert left.dtype == torch.int32
    for text, place, before in zip(left, places, tokens, strict=True):
        count = int((text >= 0).sum())
        assert 0 < count < 30
        assert (text[count:] == -1).all()
        assert text[0] == 1  # the first word stays
        assert torch.equal(text[:count], before[place[:count]])
        assert (place[:count].diff() > 0).all()
    shares = (left >= 0).sum() / (tokens >= 0).sum()
    assert 0.37 < shares < 0.47  # 0.4 of all, and the first of each


def test_nothing_is_left_out() -> None:
    left, places = leave_out_words(TOKENS, 0.0)
    assert torch.equal(left, TOKENS)
    assert places.tolist() == [[0, 1, 2, 3]] * 2


def test_a_text_without_words_stays_empty() -> None:
    assert leave_out_words(torch.full((2, 3), -1), 0.5)[0].tolist() == [[-1] * 3] * 2
