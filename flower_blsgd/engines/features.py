"""Optional features of a grid, with defaults for grids that do not have them."""

from collections.abc import Collection, Mapping, Sequence

from flwr.serverapp import Grid

from ..devices.worker_spec import WorkerSpec


class GridFeatures:
    """Methods that a grid may have in addition to Flower's; the defaults do nothing.

    Flower's own grids (plain messages, simulation) have the defaults; see `features_of`. `workers`
    are those of the nodes as the user describes them, in the order of the node ids.
    """

    workers: Sequence[WorkerSpec] = ()

    def take_deaths(self) -> list[int]:
        """Return the nodes whose process died between two messages, each death once."""
        return []

    def give_up(self, node_of: Mapping[str, int]) -> None:
        """Stop waiting for the replies to these messages.

        `node_of` has the node of each message, by the id of the message.
        """

    @property
    def connected_nodes(self) -> Collection[int]:
        """The nodes that messages reach within milliseconds."""
        return ()

    @property
    def wire_errors(self) -> Mapping[str, float]:
        """Mean relative error of the models that nodes received, by the name of the record.

        Empty where models travel without rounding.
        """
        return {}


def features_of(grid: Grid) -> GridFeatures:
    """Return the features of any Flower grid."""
    return grid if isinstance(grid, GridFeatures) else _NONE


_NONE = GridFeatures()
