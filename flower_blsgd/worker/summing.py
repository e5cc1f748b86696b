"""Add up a slice of other workers' models: what a slow worker does under ``byteps``."""

import time

from flwr.app import Message

from ..algorithm.averaging import weighted_average
from ..array_view import view_record
from ..protocol import SumOrder, SumReport


def answer_sum(message: Message) -> Message:
    """Answer a message to sum.

    Raises
    ------
    ProtocolError
        If the message holds none.
    """
    order = SumOrder.from_message(message)
    started_at = time.time()
    summed = weighted_average(order.models(), order.weights)
    return SumReport(view_record(summed), started_at, time.time()).to_reply(message)
