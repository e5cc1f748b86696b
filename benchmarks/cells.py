"""Which cells of the table of rounds are measured: so many workers, so many parameters, an engine.

A cell that does not fit the free memory, or that would take too long, is not started: it would
take the machine down, or nobody would wait for it. What an engine needs is estimated generously
from runs of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import filesize

LONGEST_RUN_SECONDS = 240.0
MOST_SUPERNODES = 10


@dataclass(frozen=True)
class Cell:
    """A size of a round.

    Parameters
    ----------
    workers : int
        That get the model and send it back.
    parameters : int
        Of the model, 4 bytes each.
    """

    workers: int
    parameters: int

    @property
    def tensors(self) -> int:
        """As many as a model of that size has: ResNet20, ResNet18, WRN28-10, ViT-B/16."""
        known = {270_000: 20, 11_000_000: 62, 36_000_000: 80, 86_000_000: 152}
        return known.get(self.parameters, min(60, self.parameters))

    @property
    def model_bytes(self) -> int:
        """Bytes of the model."""
        return 4 * self.parameters

    @property
    def round_bytes(self) -> int:
        """Bytes of one model per worker."""
        return self.workers * self.model_bytes

    def __str__(self) -> str:
        return f"{self.workers} x {self.parameters / 1e6:g} M"


GOAL_CELLS = (Cell(4, 270_000), Cell(10, 36_000_000))


@dataclass(frozen=True)
class Engine:
    """What a run on an engine costs, by rough and generous estimate.

    Parameters
    ----------
    name : str
        In the rows.
    start_seconds, worker_start_seconds : float
        Until the first round, and for each worker.
    round_seconds, gigabyte_seconds : float
        Of a round, and for each gigabyte of one model per worker.
    worker_bytes, model_copies : float
        Memory of a worker's processes, and how many models per worker are in memory at once.
    warm_up_rounds : int
        Left out: processes start in them, and memory is got.
    fewest_rounds, most_rounds : int
        That are measured.
    supernodes : bool (default: False)
        Whether each worker is a SuperNode.
    """

    name: str
    start_seconds: float
    worker_start_seconds: float
    round_seconds: float
    gigabyte_seconds: float
    worker_bytes: float
    model_copies: float
    warm_up_rounds: int
    fewest_rounds: int
    most_rounds: int
    supernodes: bool = False

    def rounds(self, cell: Cell, quick: bool) -> int:
        """Return how many rounds are measured: as many as some seconds allow."""
        seconds = self.round_seconds + self.gigabyte_seconds * cell.round_bytes / 1e9
        most = self.most_rounds // 2 if quick else self.most_rounds
        return max(self.fewest_rounds, min(most, int((5 if quick else 15) / seconds)))

    def seconds(self, cell: Cell, quick: bool = False) -> float:
        """Return about how long a run takes."""
        a_round = self.round_seconds + self.gigabyte_seconds * cell.round_bytes / 1e9
        rounds = self.warm_up_rounds + self.rounds(cell, quick)
        return self.start_seconds + self.worker_start_seconds * cell.workers + rounds * a_round

    def memory_bytes(self, cell: Cell) -> float:
        """Return about how much memory a run takes."""
        models = self.model_copies * cell.round_bytes + 3 * cell.model_bytes
        return models + self.worker_bytes * cell.workers

    def why_not(self, cell: Cell, free_bytes: int | None, quick: bool = False) -> str | None:
        """Return why this cell is not started; None if it is."""
        if self.supernodes and cell.workers > MOST_SUPERNODES:
            processes = filesize.decimal(int(self.worker_bytes * cell.workers))
            return (
                f"{cell.workers} SuperNodes and their processes alone need {processes}; "
                f"at most {MOST_SUPERNODES} are started"
            )
        needed = self.memory_bytes(cell)
        if free_bytes is not None and needed > free_bytes:
            sizes = filesize.decimal(int(needed)), filesize.decimal(free_bytes)
            return f"needs about {sizes[0]}, free are {sizes[1]}"
        seconds = self.seconds(cell, quick)
        if seconds > LONGEST_RUN_SECONDS:
            return (
                f"would take about {seconds:.0f} s; at most {LONGEST_RUN_SECONDS:.0f} s are spent"
            )
        return None


ENGINES = {
    "local": Engine("local grid", 3, 0.2, 0.005, 4, 8e7, 2.5, 5, 8, 200),
    "biased": Engine("local grid, BiasedLocalSGD", 4, 0.2, 0.008, 6, 8e7, 3.5, 5, 8, 200),
    "ray": Engine("Ray simulation", 15, 2, 0.2, 15, 2.5e8, 7, 3, 4, 20),
    "ray-stock": Engine("Ray simulation as it comes", 15, 1, 0.2, 25, 1e8, 7, 3, 4, 20),
    "stream": Engine("deployment, stream", 12, 3, 0.01, 8, 5.5e8, 6, 3, 5, 100, supernodes=True),
    "messages": Engine("deployment, messages", 12, 3, 10, 60, 6e8, 10, 1, 4, 12, supernodes=True),
    "grpc": Engine("bare gRPC with TLS", 1, 0.3, 0.005, 8, 6e7, 2.5, 3, 5, 100),
    "memcpy": Engine("memcpy", 0, 0, 0.0001, 1, 0, 0, 1, 5, 200),
}
"""By their names on the command line. `memcpy` copies within bounded memory, whatever the cell."""


def turns(competitors: Sequence[str], repeats: int) -> Iterator[str]:
    """Yield who runs when: the local grid again before each other one, so that ratios hold."""
    others = [name for name in competitors if name != "local"]
    for _ in range(repeats):
        for other in others:
            if "local" in competitors:
                yield "local"
            yield other
        if not others:
            yield from competitors  # the local grid alone, or nobody
