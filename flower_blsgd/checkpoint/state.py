"""Save and restore the training state: the sum of the states of all parts of a run.

After `restore`, the next round has the same orders as without the interruption, and each worker its
momentum. A checkpoint of other data, another model or another outer optimizer is rejected.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp import Grid

from ..engines.features import features_of
from ..errors import UsageError, first_line
from ..flower.array_records import AnyArray, tensors_of, view_record
from ..protocol import CONFIG, MOMENTUM, OWN_MODEL, QUERY_MOMENTUM, Failure, HostOrders
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.messages import node_messages, read_answer, replies_to
from ..strategy.replies import ModelShape
from ..strategy.rounds import EpochEnd
from .store import Checkpoint

_LOG = logging.getLogger(__name__)

_LEAST_MOMENTUM_SECONDS, _MOST_MOMENTUM_SECONDS = 60.0, 600.0
"""Limits of the time to wait for momentum, which is otherwise that of an order."""

_TENSOR = "$tensor"
"""Key that marks the place of an array in the values of a checkpoint."""

Tensors = Mapping[str, AnyArray]


# --- save ---------------------------------------------------------------------------------------


def capture(
    strategy: BiasedLocalSGD,
    grid: Grid,
    server_round: int,
    arrays: ArrayRecord,
    with_momentum: bool = True,
    before: Checkpoint | None = None,
) -> Checkpoint:
    """Return the state of a run between two rounds, after at least one.

    With the momentum policy ``"keep"``, workers that the grid reaches quickly are queried for their
    momentum, except workers whose last order was late. After a failed round, set `with_momentum` to
    False, because their momentum does not fit the model. If `before`, a checkpoint of the same
    round, is given, its momentum is used instead. `server_round` is the last completed round,
    counted from 1, and `arrays` the global model after it, which must not change.
    """
    if before is None:
        # Workers that are a step ahead no longer have the state after the round.
        query = with_momentum and not strategy.planner.ahead
        momentum, models = _states_by_worker(strategy, grid, ModelShape(arrays), query)
    else:
        state = expanded(before)
        momentum, models = state["momentum"], state["own-models"]
    return flattened(
        {
            "round": server_round,
            "model": tensors_of(arrays),
            "momentum": momentum,
            "own-models": models,
            "unevaluated": [
                {
                    "epoch": end.epoch,
                    "round": end.round,
                    "model": None if end.round == server_round else tensors_of(end.arrays),
                }
                for end in strategy.unevaluated
            ],
            **strategy.state_dict(),
        }
    )


def flattened(state: Mapping[str, Any]) -> Checkpoint:
    """Convert nested mappings and sequences to JSON values and named arrays."""
    tensors: dict[str, AnyArray] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray):
            tensors[path] = value
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            return {key: plain(each, f"{path}/{key}") for key, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [plain(each, f"{path}/{i}") for i, each in enumerate(value)]
        return value

    values = {key: plain(value, key) for key, value in state.items()}
    return Checkpoint(values, tensors)


def expanded(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the nested state of a checkpoint, the inverse of `flattened`."""

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {_TENSOR}:
                return checkpoint.tensors[value[_TENSOR]]
            return {key: whole(each) for key, each in value.items()}
        return [whole(each) for each in value] if isinstance(value, list) else value

    return {key: whole(value) for key, value in checkpoint.values.items()}


def _states_by_worker(
    strategy: BiasedLocalSGD, grid: Grid, model_shape: ModelShape, query: bool
) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Return the checked momentum and own models of workers by index.

    The next round begins with the own models, if there are any. Sets `no_momentum` of all workers.
    """
    planner = strategy.planner
    keeps, continues = planner.settings.momentum_buffers == "keep", planner.continues
    if not (keeps or continues):
        return {}, {}
    # What workers have not received since the last resume.
    found: dict[int, Tensors] = {i: tensors_of(r) for i, r in planner.resumed_momentum.items()}
    models: dict[int, Tensors] = {i: tensors_of(r) for i, r in planner.resumed_models.items()}
    connected_nodes = features_of(grid).connected_nodes if query else ()  # others take seconds
    workers = [
        worker
        for worker in strategy.registry.workers
        if worker.trains and worker.present and worker.node_id in connected_nodes
        if worker.index not in found and worker.index not in models
        if not (worker.failures_in_a_row and worker.failures[-1] == "late")
    ]
    seconds = max(_LEAST_MOMENTUM_SECONDS, strategy.patience_seconds(_MOST_MOMENTUM_SECONDS))
    to_host = functools.partial(HostOrders, patience_seconds=seconds)
    content = RecordDict({CONFIG: ConfigRecord({OWN_MODEL: continues})})
    contents = [(worker.address, content) for worker in workers]
    replies = replies_to(grid, node_messages(contents, QUERY_MOMENTUM, to_host), seconds)
    reasons: dict[int, str] = {}

    def read(content: RecordDict) -> tuple[Tensors, Tensors]:
        momentum = model_shape.checked_momentum(content.array_records[MOMENTUM])
        own = content.array_records.get(OWN_MODEL)
        return momentum, model_shape.checked(own) if own else {}

    for worker in workers:
        answer = read_answer(replies.get(worker.node_id), worker.local_rank, read)
        if isinstance(answer, Failure):
            reasons[worker.index] = answer.brief
            if worker.no_momentum != answer.brief:
                _LOG.warning("checkpoint without momentum of %s: %s", worker.label, answer.brief)
        else:
            found[worker.index], models[worker.index] = answer
    own_models = {str(index): tensors for index, tensors in models.items() if tensors}
    if not keeps:
        return {}, own_models
    for worker in strategy.registry.workers:
        reason = reasons.get(worker.index, "it was not queried")
        worker.no_momentum = "" if worker.index in found else reason
    return {str(index): tensors for index, tensors in found.items()}, own_models


# --- restore ------------------------------------------------------------------------------------


def restore(
    strategy: BiasedLocalSGD, checkpoint: Checkpoint, model: ArrayRecord
) -> tuple[ArrayRecord, int]:
    """Restore the state of a checkpoint into a new strategy.

    Returns the global model and the last completed round. Momentum travels with each worker's next
    order. `model` has the names, shapes and dtypes of the run's model. UsageError if the checkpoint
    does not fit the strategy or the model, or is not a training state; do not use the strategy
    afterwards.
    """
    try:
        return _restore(strategy, expanded(checkpoint), ModelShape(model))
    except Exception as error:  # the content may be anything
        raise UsageError(
            f"{checkpoint.source} cannot be resumed from: {first_line(error)[:200]}; resume with "
            "the settings and the data that it was written with, or start a new run"
        ) from None


def _restore(
    strategy: BiasedLocalSGD, state: Mapping[str, Any], shape: ModelShape
) -> tuple[ArrayRecord, int]:
    arrays, server_round = _checked_model(shape, state["model"]), state["round"]
    strategy.load_state_dict(state)
    planner, workers = strategy.planner, strategy.registry.workers
    if averaged := planner.averaged_momentum:
        planner.averaged_momentum = view_record(shape.checked_momentum(averaged))
    for end in state["unevaluated"]:
        epoch, evaluated_round = end["epoch"], end["round"]
        if not (0 < epoch <= planner.progress.epoch and 0 < evaluated_round <= server_round):
            raise ValueError("it has a model to evaluate that refers to a future round")
        model = arrays if end["model"] is None else _checked_model(shape, end["model"])
        strategy.unevaluated.append(EpochEnd(epoch, evaluated_round, model))
    planner.resumed_models = {
        int(index): _checked_model(shape, tensors)
        for index, tensors in state.get("own-models", {}).items()
    }
    if planner.settings.momentum_buffers == "keep":
        planner.resumed_momentum = {
            int(index): view_record(shape.checked_momentum(view_record(tensors)))
            for index, tensors in state["momentum"].items()
        }
        if lost := ", ".join(w.label for w in workers if w.no_momentum and w.trains):
            _LOG.warning("no momentum in the checkpoint, so it starts at zero: %s", lost)
    return arrays, server_round


def _checked_model(shape: ModelShape, tensors: Tensors) -> ArrayRecord:
    return view_record(shape.checked(view_record(tensors)))
