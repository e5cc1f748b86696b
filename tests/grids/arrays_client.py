"""A Flower app that does things with arrays. The tests of shared memory copy it into a folder.

Two apps of the same handler: `app` knows nothing of flower_blsgd, `viewing_app` accepts views.
"""

import functools
import os
import sys
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.flower.app_call import accept_views, after_reply

app, viewing_app = ClientApp(), ClientApp()
accept_views(viewing_app)

_DONE: list[str] = []


def _wait_for(file: str) -> None:
    until = time.monotonic() + 60
    while not os.path.exists(file) and time.monotonic() < until:
        time.sleep(0.01)
    _DONE.append(file)


@app.train()
@viewing_app.train()
def train(message: Message, context: Context) -> Message:
    order, arrays = message.content["order"], message.content.array_records.get("arrays")
    answer: dict[str, object] = {"pid": os.getpid()}
    back = RecordDict()
    what = order["do"]
    if arrays is not None:
        array = arrays["x"]
        memory = array.numpy()
        answer |= {
            "first": float(memory.flat[0]),
            "last": float(memory.flat[-1]),
            "is-a-view": bool(np.shares_memory(memory, array.numpy())),
        }
    if what == "scribble":
        memory[...] = 99.0
        answer["seen-after"] = float(array.numpy().flat[0])
    elif what == "double":
        back["arrays"] = ArrayRecord({"x": Array(memory * 2)})
    elif what == "keep-in-state":
        context.state["kept"] = arrays
    elif what == "scribble-state":
        context.state["kept"]["x"].numpy()[...] = -1.0
        answer["kept"] = float(context.state["kept"]["x"].numpy().flat[0])
    elif what == "later":
        after_reply(functools.partial(_wait_for, str(order["file"])))
    elif what == "what-was-done":
        answer["done"] = len(_DONE)
    elif what == "raise":
        raise ValueError("on purpose")
    elif what == "return-none":
        return None  # type: ignore[return-value]
    elif what == "die":
        os._exit(3)
    elif what == "shipped":
        answer |= sys.modules["shipped"].call(context.node_id, dict(order))
    back["answer"] = ConfigRecord(answer)
    return Message(back, reply_to=message)
