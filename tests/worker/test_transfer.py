"""Copies of a model to and from a card, in pieces."""

import pytest
import torch
from torch import nn

from flower_blsgd.engines.local.shared_memory import BufferPool
from flower_blsgd.flower.array_records import Flat, flat_of, flat_record
from flower_blsgd.worker import transfer
from flower_blsgd.worker.model_io import load_state, state_record

from ..fake_cuda.log import recorded
from ..in_process_grid import same_bits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # 4,096 and 128 bytes, 16,384 and 512 bytes
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 128))


def flat(record: object) -> Flat:
    found = flat_of(record)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("piece_bytes", "copied"),
    [(1 << 25, [21_120]), (8_192, [4_224, 16_384, 512]), (4_000, [4_096, 128, 16_384, 512])],
)
def test_every_piece_is_one_copy(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, copied: list[int]
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece_bytes)
    start, pool = state_record(make_model(1)), BufferPool()
    order = flat_record(flat(start).layout, new_memory=pool.new_memory)
    flat(order).bytes[:] = flat(start).bytes
    model = make_model(2).to("cuda:0")
    reply = None
    for _ in range(2):
        del reply  # so that its block is used again
        with recorded() as events:
            load_state(model, order)
            reply = state_record(model, like=order)
        for kind in ("copy to card", "copy to host"):
            copies = [event for event in events if event.kind == kind]
            assert [event.num_bytes for event in copies] == copied
        assert not [event for event in events if event.kind == "race"]
        assert same_bits(reply, start)
