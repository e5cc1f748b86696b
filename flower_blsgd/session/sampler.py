"""Sampler of a session: which samples this worker trains on."""

import itertools
from collections.abc import Callable, Iterator, Sized

from torch.utils.data import Sampler

from ..algorithm.randomness import generator
from ..algorithm.sampling import permutation_stream
from ..protocol import TrainOrder


class SessionSampler(Sampler[int]):
    """Samples of this worker; see `Session.sampler`.

    `seed` is that of the run, and `wait_for_order` returns the current order, of the first one
    on. Without `wait_for_order`, the script runs alone, with its own seed.
    """

    def __init__(
        self,
        dataset: Sized,
        by_loss: bool,
        seed: int,
        wait_for_order: Callable[[], TrainOrder | None] | None,
    ) -> None:
        if len(dataset) < 1:
            raise ValueError("session.sampler: the data set is empty")
        self.by_loss = by_loss
        self._num_samples = len(dataset)
        self._seed = seed
        self._wait_for_order = wait_for_order
        self._passes = 0
        self._rest: Iterator[int] | None = None
        """What is left of the stream, since a script may begin to iterate at any time."""
        self._order: TrainOrder | None = None
        self._position = 0
        """In the samples of `_order`."""

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        if self._wait_for_order is None:
            self._passes += 1
            draw = generator(self._seed, "session", self._passes)
            return iter(draw.permutation(self._num_samples).tolist())
        if self.by_loss:
            return self._by_order(self._wait_for_order)
        if self._rest is None:
            # A generator would be closed by the end of one that yields from it.
            self._rest = itertools.chain(self._stream(self._wait_for_order))
        return self._rest

    def _by_order(self, current: Callable[[], TrainOrder | None]) -> Iterator[int]:
        """Yield the samples of the current order, then of the next one if it is there by then."""
        last = None
        while (order := current()) is not None and order is not last:
            last, indices = order, order.indices.tolist()
            if order is not self._order or self._position == len(indices):
                self._order, self._position = order, 0
            for index in indices[self._position :]:
                if current() is not order:  # a deadline has ended it
                    break
                self._position += 1
                yield index

    def _stream(self, current: Callable[[], TrainOrder | None]) -> Iterator[int]:
        """Yield this worker's part of each round's block of the stream, ahead of the orders.

        A loader that reads ahead asks for the samples of later rounds before their orders arrive.
        They are known as long as no worker's steps change.
        """
        part, start = (0, 0, 0), 0
        while (order := current()) is not None:
            first, stride = order.stream_start, order.stream_stride
            count = order.local_steps * order.batch_size
            if (first % stride, stride, count) != part:
                part, start = (first % stride, stride, count), first
            stream = permutation_stream(self._seed, self._num_samples, start, count)
            yield from stream.tolist()
            start += stride
