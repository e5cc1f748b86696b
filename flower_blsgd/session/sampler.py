"""Sampler of a session: which samples this worker trains on."""

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING

from torch.utils.data import Sampler

from ..algorithm.randomness import generator
from ..algorithm.sampling import permutation_stream

if TYPE_CHECKING:
    from .session import Session


class SessionSampler(Sampler[int]):
    """Samples of this worker; see `Session.sampler`."""

    def __init__(self, session: "Session", dataset: Sized, by_loss: bool) -> None:
        if len(dataset) < 1:
            raise ValueError("session.sampler: the data set is empty")
        self._session, self._num_samples, self._by_loss = session, len(dataset), by_loss
        self._passes = 0

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        if self._session.is_alone:
            self._passes += 1
            order = generator(self._session.seed, "session", self._passes)
            yield from order.permutation(self._num_samples).tolist()
            return
        self._session.wait_for_first_order()
        yield from self._by_order() if self._by_loss else self._stream()

    def _by_order(self) -> Iterator[int]:
        """Yield the samples of the current order, then of the next one if it is there by then."""
        last = None
        while (order := self._session.order) is not None and order is not last:
            last = order
            for index in order.indices.tolist():
                if self._session.order is not order:  # a deadline has ended it
                    break
                yield index

    def _stream(self) -> Iterator[int]:
        """Yield this worker's part of each round's block of the stream, ahead of the orders.

        A loader that reads ahead asks for the samples of later rounds before their orders arrive.
        They are known as long as no worker's steps change.
        """
        part, start, seed = (0, 0, 0), 0, self._session.run_seed
        while (order := self._session.order) is not None:
            first, stride = order.stream_start, order.stream_stride
            count = order.local_steps * order.batch_size
            if (first % stride, stride, count) != part:
                part, start = (first % stride, stride, count), first
            yield from permutation_stream(seed, self._num_samples, start, count).tolist()
            start += stride
