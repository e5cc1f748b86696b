"""Average the models, metrics and momentum of a round."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from ..algorithm.averaging import (
    Weighting,
    average_at_node,
    average_by_load,
    node_weight,
    weighted_average,
)
from ..algorithm.outer_optimizer import OuterOptimizer
from ..algorithm.tensor_sum import AnyArray, move
from ..algorithm.validation import checked_numbers, checked_weights
from ..flower.array_records import (
    PrivateArray,
    common_runs,
    flat_like,
    tensors_of,
    view_record,
)
from ..protocol import (
    ARRAYS,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    NUM_EXAMPLES,
    TIMING_KEYS,
    HostOrders,
)
from ..protocol.records import unchecked_content, unchecked_record
from .replies import CheckedReply
from .round import Outcome, Round

Part = TypeVar("Part")

_RUNNING = ("running_mean", "running_var")


@dataclass
class Averaging:
    """Weighting, average and outer optimizer of a run.

    The outer optimizer applies the averaged update to the parameters; buffers are only averaged.
    Without `parameter_names`, the parameters are all floating-point tensors except BatchNorm's
    running statistics. Tied weights have several names in a state dict but only one in
    `named_parameters`, so a tensor that equals a parameter in all models counts as one.
    """

    weighting: Weighting
    outer_optimizer: OuterOptimizer | None = None
    parameter_names: Collection[str] | None = None

    def next_model(
        self, round: Round, outcomes: Sequence[Outcome]
    ) -> tuple[ArrayRecord, list[float]]:
        """Return the next global model, and the weight of each worker.

        Without any completed step this is the model of the round, and all weights are 0. The
        outcomes are in worker order. On the local grid, the average is written into the memory that
        it is sent from.
        """
        if not any(outcome.load for outcome in outcomes):
            return round.arrays, [0.0] * len(outcomes)
        average = round.slow_reduce or weighted_average
        # evaluate_fn may write to what it reads
        record = flat_like(round.arrays, kind=PrivateArray)
        began = tensors_of(round.arrays)
        out = tensors_of(record)
        weights = checked_weights(self.weighting, [outcome.load for outcome in outcomes])
        models, shares = once_per_node(outcomes, weights, lambda reply: reply.tensors)
        parameters: Collection[str] = ()
        if self.weighting.scales_updates or self.outer_optimizer is not None:
            parameters = self._parameters(began, [model for model in models if model])
        if self.weighting.scales_updates:
            steps = [o.report.completed_steps if o.report else 0 for o in outcomes]
            scales = self.weighting.update_scales(weights, steps)
            scales = checked_numbers(self.weighting, "update_scales", scales, len(weights))
            _, scales = once_per_node(outcomes, scales, lambda reply: reply.tensors)
            to, first, *others = common_runs(out, began, *models)
            move(first, others, scales, to)
            buffers = [name for name in out if name not in parameters]
            counted = [(model, share) for model, share in zip(models, shares, strict=True) if model]
            parts = [{name: model[name] for name in buffers} for model, _ in counted]
            if buffers:
                average(parts, [share for _, share in counted], {n: out[n] for n in buffers})
        else:
            to, *others = common_runs(out, *models)
            average(others, shares, to)
        if self.outer_optimizer is not None:
            averaged = self.outer_optimizer.step(began, dict(out), parameters)
            for name, tensor in out.items():
                tensor[...] = averaged[name]
        return record, weights

    def at_nodes(self, model: ArrayRecord, longest_steps: int) -> dict[str, Any]:
        """Return the fields of `HostOrders` for averaging at a node with several devices.

        `model` is the global model, and `longest_steps` the largest number of ordered steps.
        """
        rule: dict[str, Any] = {"worker_weight": node_weight(self.weighting)}
        if self.weighting.scales_updates:
            norms = map(self.weighting.update_norm, range(longest_steps + 1))
            parameters = self._parameters(tensors_of(model))
            sure = parameters if self.parameter_names is None else self.parameter_names
            rule["update_norms"] = [float(norm) for norm in norms]
            rule["moving"] = [name for name in model if name in parameters]
            rule["maybe_tied"] = tuple(name for name in rule["moving"] if name not in sure)
        return rule

    def _parameters(
        self, model: Mapping[str, AnyArray], trained: Sequence[Mapping[str, AnyArray]] = ()
    ) -> Collection[str]:
        """Return the names of the parameters; tied weights are found by equal values."""
        moving = {
            name
            for name, tensor in model.items()
            if tensor.dtype.kind in "fc" and name.rpartition(".")[2] not in _RUNNING
        }
        names = self.parameter_names
        if names is None:
            return moving
        tied = _tied(moving.difference(names), moving.intersection(names), (model, *trained))
        return tied.union(names)


def _tied(
    others: Collection[str], names: Collection[str], models: Sequence[Mapping[str, AnyArray]]
) -> set[str]:
    """Return those of the other tensors that equal one of the named ones in all models."""
    return {
        other
        for other in others
        for name in names
        if all(np.array_equal(found[other], found[name]) for found in models)
    }


def average_on_node(replies: Sequence[CheckedReply], rule: HostOrders) -> RecordDict:
    """Return the records of a node with several devices: the averages of its workers' replies.

    The rule is that of `Averaging.at_nodes`. The replies are in worker order.
    """
    counted = [reply for reply in replies if reply.report.num_examples]
    loads = [float(reply.report.num_examples) for reply in counted]
    records = RecordDict({METRICS: MetricRecord({NUM_EXAMPLES: int(sum(loads))})})
    if not counted:
        return records
    steps = [reply.report.completed_steps for reply in counted]
    models = [reply.tensors for reply in counted]
    moving = [name for name in rule.moving if name not in rule.maybe_tied]
    if rule.maybe_tied:
        began = tensors_of(next(iter(rule.contents.values())).array_records[rule.arrays_key])
        moving += _tied(rule.maybe_tied, moving, (began, *models))
    records[ARRAYS] = view_record(
        average_at_node(models, loads, steps, rule.worker_weight, rule.update_norms, moving)
    )
    sent = [dict.fromkeys(reply.momentum, load) for reply, load in zip(counted, loads, strict=True)]
    if momentum := average_by_load([reply.momentum for reply in counted], sent):
        records[MOMENTUM] = view_record(momentum)
        of_senders = {name: sum(own.get(name, 0.0) for own in sent) for name in momentum}
        partial: dict[str, Any] = {n: x for n, x in of_senders.items() if x != sum(loads)}
        if partial:
            records[MOMENTUM_LOADS] = MetricRecord(partial)
    return records


def average_metrics(
    outcomes: Sequence[Outcome], average: Callable[..., MetricRecord | None], weighted_by_key: str
) -> MetricRecord:
    """Average the metrics of the successful workers, as Flower does, and add up their samples.

    Times are omitted, because their average has no meaning. Metrics whose shape differs from the
    first worker's are omitted, too.
    """
    if not any(outcome.load for outcome in outcomes):
        return MetricRecord({weighted_by_key: 0})
    contents = []
    counted = [o.reply.metrics for o in outcomes if o.reply is not None and o.load > 0]
    forms = {key: _length(v) for key, v in counted[0].items() if key not in TIMING_KEYS}
    for own in counted:
        kept = {k: v for k, v in own.items() if _length(v) == forms.get(k)}
        contents.append(unchecked_content({METRICS: unchecked_record(MetricRecord, kept)}))
    metrics = average(contents, weighted_by_key) or MetricRecord()
    metrics[weighted_by_key] = int(sum(outcome.load for outcome in outcomes))
    return metrics


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1


def average_momentum(outcomes: Sequence[Outcome]) -> ArrayRecord | None:
    """Average the optimizer states that were sent, by load; None without any.

    Each tensor is averaged over the workers that sent it. Step counters are averaged, too, and
    become fractions.
    """
    counted = [outcome for outcome in outcomes if outcome.load > 0]
    of_workers = [outcome.load for outcome in counted]
    states, loads = once_per_node(counted, of_workers, lambda reply: reply.momentum)
    partial, _ = once_per_node(counted, of_workers, lambda reply: reply.momentum_loads)
    sent = [
        {**dict.fromkeys(state, load), **own}
        for state, load, own in zip(states, loads, partial, strict=True)
    ]
    momentum = average_by_load(states, sent)
    return view_record(momentum) if momentum else None


def once_per_node(
    outcomes: Sequence[Outcome],
    shares: Sequence[float],
    part: Callable[[CheckedReply], Mapping[str, Part]],
) -> tuple[list[Mapping[str, Part]], list[float]]:
    """Return a part of each reply with its share of a sum, in worker order.

    The workers of one node with several devices have the same part. It is returned once, with the
    sum of their shares.
    """
    found: dict[int, Mapping[str, Part]] = {}
    sums: dict[int, float] = {}
    for outcome, share in zip(outcomes, shares, strict=True):
        if outcome.reply is not None:
            node_id = outcome.worker.node_id
            found[node_id] = part(outcome.reply)
            sums[node_id] = sums.get(node_id, 0.0) + share
    return list(found.values()), list(sums.values())
