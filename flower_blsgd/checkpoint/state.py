"""What the rounds to come depend on, taken from a strategy and its workers, and put back.

After `restore` into a new strategy with new workers the next round has the orders that it would
have had, and each worker its momentum. A file that is damaged never gets here (its checksum is in
its name); one of other data, another model or another outer optimizer is refused.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp import Grid

from ..algorithm.epoch_plan import EpochPlan, RoundShape, SamplingStats
from ..algorithm.sampling import LossTable, SampleList
from ..errors import UsageError, first_line
from ..grids.array_records import AnyArray, tensors_of, view_record
from ..grids.features import features_of
from ..protocol import (
    CONFIG,
    MOMENTUM,
    QUERY_MOMENTUM,
    Failure,
    HostOrders,
    WorkerProfile,
)
from ..protocol.records import from_wire, to_wire
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.fit_loop import EpochEnd
from ..strategy.planner import Planner
from ..strategy.profiles import node_messages, read_answer, replies_to
from ..strategy.replies import ModelShape
from ..strategy.workers import UNKNOWN_NODE, Worker
from .store import Checkpoint

_LOG = logging.getLogger(__name__)

_LEAST_MOMENTUM_SECONDS, _MOST_MOMENTUM_SECONDS = 60.0, 600.0
"""Workers have as long to send their momentum as for an order, within these bounds."""

Tensors = Mapping[str, AnyArray]


# --- capture ------------------------------------------------------------------------------------


def capture(
    strategy: BiasedLocalSGD,
    grid: Grid,
    server_round: int,
    arrays: ArrayRecord,
    with_momentum: bool = True,
    before: Checkpoint | None = None,
) -> Checkpoint:
    """Return the state of a run between two rounds.

    Where workers keep momentum, those that the grid reaches quickly are queried for it, but for
    those that were late last: they may hang.

    Parameters
    ----------
    strategy : BiasedLocalSGD
        At least one round of it is over.
    grid : Grid
        Where its workers are.
    server_round : int
        The round that is over, counted from 1.
    arrays : ArrayRecord
        The global model after it, which does not change any more.
    with_momentum : bool (default: True)
        Whether to query the workers. After a round that failed their momentum is another one.
    before : Checkpoint, optional
        Of the same round: it has their momentum, and they are not queried again.
    """
    if before is None:
        momentum = _momentum_by_worker(strategy, grid, ModelShape(arrays), with_momentum)
    else:
        momentum = {k: t for k, t in before.tensors.items() if k.startswith(f"{MOMENTUM}-")}
    planner, plan, model = strategy.planner, strategy.planner.plan, tensors_of(arrays)
    kept = getattr(strategy.aggregation.outer_optimizer, "kept", {})
    averaged = strategy.averaged_momentum
    lists = {str(i): samples.indices for i, samples in enumerate(plan.sample_lists)}
    weights = {} if plan.weights is None else {"weights": plan.weights}
    parts: dict[str, Tensors] = {
        "model": model,
        "table": _arrays_of(planner.table),
        "plan": {**lists, **weights},
        "stats": {n: np.asarray(v) for n, v in vars(planner.sampling_stats).items()},
        "outer": {n: tensor.copy() for n, tensor in kept.items()},
        "averaged": tensors_of(averaged) if averaged else {},
    }
    for rank, end in enumerate(strategy.unevaluated):
        parts[f"unevaluated-{rank}"] = tensors_of(end.arrays) if end.round != server_round else {}
    values = {
        "round": server_round,
        "progress": _progress_of(planner),
        "rounds": plan.rounds,
        "first-round": plan.first_round,
        "shape": to_wire(plan.shape),
        "local-steps-fast": planner.local_steps_fast,
        "planned-for": [worker.index for worker in planner.workers],
        "members": [list(sample_list.members) for sample_list in plan.sample_lists],
        "model": list(model),
        "unevaluated": [[end.epoch, end.round] for end in strategy.unevaluated],
        "workers": [
            {**to_wire(worker), "profile": to_wire(worker.profile)}
            for worker in strategy.registry.workers
        ],
    }
    return Checkpoint(values, {**_by_path(parts), **momentum})


def _by_path(parts: Mapping[str, Tensors]) -> dict[str, AnyArray]:
    return {f"{part}/{name}": t for part, named in parts.items() for name, t in named.items()}


def _momentum_by_worker(
    strategy: BiasedLocalSGD, grid: Grid, model_shape: ModelShape, query: bool
) -> dict[str, AnyArray]:
    """Return what each worker that answers keeps, checked; record why the others have none."""
    if strategy.planner.momentum_buffers != "keep":
        return {}
    # Of those that had no order that succeeded since the last resume.
    found: dict[int, Tensors] = {i: tensors_of(r) for i, r in strategy.resumed_momentum.items()}
    fast_nodes = features_of(grid).fast_nodes if query else ()  # of others it takes seconds
    workers = [
        worker
        for worker in strategy.registry.workers
        if worker.trains and worker.present and worker.node_id in fast_nodes
        if worker.index not in found
        if not (worker.failures_in_a_row and worker.failures[-1] == "late")
    ]
    seconds = max(_LEAST_MOMENTUM_SECONDS, strategy.patience_seconds(_MOST_MOMENTUM_SECONDS))
    to_host = functools.partial(HostOrders, patience_seconds=seconds)
    content = RecordDict({CONFIG: ConfigRecord()})
    contents = [(worker.address, content) for worker in workers]
    replies = replies_to(grid, node_messages(contents, QUERY_MOMENTUM, to_host), seconds)
    reasons: dict[int, str] = {}

    def read(content: RecordDict) -> Tensors:
        return model_shape.checked_momentum(content.array_records[MOMENTUM])

    for worker in workers:
        answer = read_answer(replies.get(worker.node_id), worker.local_rank, read)
        if isinstance(answer, Failure):
            reasons[worker.index] = answer.brief
            if worker.no_momentum != answer.brief:
                _LOG.warning("no momentum of %s in a checkpoint: %s", worker.label, answer.brief)
        else:
            found[worker.index] = answer
    for worker in strategy.registry.workers:
        reason = reasons.get(worker.index, "it was not queried")
        worker.no_momentum = "" if worker.index in found else reason
    return _by_path({f"{MOMENTUM}-{index}": tensors for index, tensors in found.items()})


def _arrays_of(table: LossTable) -> dict[str, AnyArray]:
    arrays = {name: v for name, v in vars(table).items() if isinstance(v, np.ndarray)}
    return {name: array.copy() for name, array in arrays.items()}


def _kinds(tensors: Tensors) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _progress_of(planner: Planner) -> dict[str, int]:
    """Return the planner's counters by name; its settings are fields."""
    settings = {field.name for field in dataclasses.fields(planner)}
    counters = {name: v for name, v in vars(planner).items() if name not in settings}
    return {name: value for name, value in counters.items() if type(value) is int}


# --- restore ------------------------------------------------------------------------------------


def restore(
    strategy: BiasedLocalSGD, checkpoint: Checkpoint, model: ArrayRecord
) -> tuple[ArrayRecord, int]:
    """Put a strategy that has not begun into the state of a checkpoint.

    The workers are recognised when they connect, by their identity; one that is on the same device
    as before keeps its speed. Momentum travels with each worker's next order.

    Parameters
    ----------
    strategy : BiasedLocalSGD
        New, with the settings of the run.
    checkpoint : Checkpoint
        Whatever it holds.
    model : ArrayRecord
        With the names, shapes and dtypes that the run's model must have.

    Returns
    -------
    tuple of ArrayRecord and int
        The global model, and the round that is over.

    Raises
    ------
    UsageError
        If it does not fit the strategy or the model, or is no such state; nothing has changed then.
    """
    try:
        return _restore(strategy, checkpoint, model)
    except Exception as error:  # whatever is in it
        raise UsageError(
            f"{checkpoint.source} cannot be resumed from: {first_line(error)[:200]}; resume with "
            "the settings and the data that it was written with, or start the run anew"
        ) from None


def _restore(
    strategy: BiasedLocalSGD, checkpoint: Checkpoint, model: ArrayRecord
) -> tuple[ArrayRecord, int]:
    values, planner = checkpoint.values, strategy.planner
    parts: dict[str, dict[str, AnyArray]] = {}
    for key, tensor in checkpoint.tensors.items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = tensor
    workers = [_worker_from(row) for row in values["workers"]]
    progress, server_round = values["progress"], values["round"]
    if progress.keys() != _progress_of(planner).keys():
        raise ValueError("its counters are not those of this version")
    plan = _plan_from(values, parts.pop("plan", {}))
    planned_for = [workers[index] for index in values["planned-for"]]
    stats = parts.pop("stats", {}).items()
    sampling_stats = SamplingStats(**{name: value.item() for name, value in stats})
    table = parts.pop("table", {})
    if _kinds(table) != _kinds(_arrays_of(planner.table)):
        raise ValueError(f"its loss table is not one of {planner.num_samples} samples")
    shape, own = ModelShape(model), parts.pop("model", {})
    arrays = view_record(shape.checked(view_record({name: own[name] for name in values["model"]})))
    averaged = shape.checked_momentum(view_record(parts.pop("averaged", {})))
    outer, velocity = strategy.aggregation.outer_optimizer, parts.pop("outer", {})
    momentum = {
        i: view_record(shape.checked_momentum(view_record(parts.pop(f"{MOMENTUM}-{i}", {}))))
        for i, worker in enumerate(workers)
        if not worker.no_momentum
    }
    unevaluated = []
    for rank, (epoch, evaluated_round) in enumerate(values["unevaluated"]):
        of_before = parts.pop(f"unevaluated-{rank}", {})
        tensors = own if evaluated_round == server_round else of_before
        found = shape.checked(view_record({name: tensors[name] for name in values["model"]}))
        if not (0 < epoch <= progress["epoch"] and 0 < evaluated_round <= server_round):
            raise ValueError("it holds a model to evaluate of a round that has not been")
        unevaluated.append(EpochEnd(epoch, evaluated_round, view_record(found)))
    unknown = velocity and not hasattr(outer, "kept")
    if parts or len(own) != len(arrays) or unknown:
        raise ValueError(f"it holds tensors that this run does not have: {sorted(parts)[:3]}")

    # All is checked: nothing fails from here on.
    vars(planner).update(progress)
    planner.take_steps(values["local-steps-fast"])
    planner.plan, planner.sampling_stats, planner.workers = plan, sampling_stats, planned_for
    for name, array in table.items():
        vars(planner.table)[name][...] = array
    if outer and velocity:
        outer.kept.update({name: tensor.copy() for name, tensor in velocity.items()})
    strategy.registry.workers, strategy.unevaluated[:] = workers, unevaluated
    strategy.averaged_momentum = view_record(averaged) if averaged else None
    if planner.momentum_buffers == "keep":
        strategy.resumed_momentum = momentum
        if lost := ", ".join(w.label for w in workers if w.no_momentum and w.trains):
            _LOG.warning("momentum is not in the checkpoint and begins with zero: %s", lost)
    return arrays, server_round


def _worker_from(row: Any) -> Worker:
    profile, fields = WorkerProfile.from_record(row["profile"]), from_wire(Worker, row)
    return Worker(**fields, node_id=UNKNOWN_NODE, present=False, profile=profile)


def _plan_from(values: Mapping[str, Any], lists: dict[str, AnyArray]) -> EpochPlan:
    fields = from_wire(RoundShape, values["shape"]).items()
    shape: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields}
    return EpochPlan(
        values["progress"]["epoch"],
        values["rounds"],
        RoundShape(**shape),
        tuple(SampleList(lists[str(i)], tuple(of)) for i, of in enumerate(values["members"])),
        lists.get("weights"),
        values["first-round"],
    )
