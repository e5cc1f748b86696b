"""First step of a round on a worker's own model, before the average of the last round is there."""

import torch
from torch import nn


class FirstStep:
    """First step of a round: the change of the parameters since this object was created.

    It takes the memory of one more model. `seconds` is the step's duration.
    """

    def __init__(self, model: nn.Module, round: int = 0) -> None:
        self.round = round
        self.losses = torch.empty(0)
        self.seconds = 0.0
        self._parameters = [p.detach() for p in model.parameters() if p.requires_grad]
        self._change = [parameter.clone() for parameter in self._parameters]

    def end(self, seconds: float) -> None:
        """Note the change and the duration of the step."""
        torch._foreach_sub_(self._change, self._parameters)
        self.seconds = seconds

    def add(self) -> None:
        """Add the change to the parameters, which now have the values of the average."""
        torch._foreach_sub_(self._parameters, self._change)
