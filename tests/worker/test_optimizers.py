"""What optimizers keep between rounds: AdamW against plain PyTorch, and records of any."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.algorithm.averaging import weighted_average
from flower_blsgd.flower.array_records import flat_like, view_record
from flower_blsgd.strategy.replies import ModelShape
from flower_blsgd.worker import local_sgd
from flower_blsgd.worker.optimizer import OptimizerState

from ..in_process_grid import over_the_wire, same_bits
from .helpers import NUM_SAMPLES, STEPS, close, closely, drawn_order, order_for, small_model
from .helpers import data as images
from .helpers import order_of as image_order

RATE, DECAY = 0.02, 0.1
ROUNDS = 4
NAMES = {
    f"{slot}/{parameter}"
    for slot in ("exp_avg", "exp_avg_sq", "step")
    for parameter in ("0.weight", "0.bias", "2.weight", "2.bias")
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_SAMPLES, 3, generator=generator), torch.arange(NUM_SAMPLES) % 4


def model_of(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def adamw_of(**settings: Any) -> LocalSGD:
    return LocalSGD(model_of(), data(), optimizer="adamw", weight_decay=DECAY, **settings)


def torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


def order_of(server_round: int, arrays: ArrayRecord, **changes: Any) -> TrainOrder:
    return drawn_order(server_round, arrays, **({"learning_rate": RATE} | changes))


def start() -> ArrayRecord:
    return ArrayRecord(model_of().state_dict())


def torch_steps(model: nn.Module, optimizer: torch.optim.Optimizer, order: TrainOrder) -> None:
    inputs, targets = data()
    for batch in np.split(order.indices.astype(np.int64), STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()


def furthest(arrays: ArrayRecord, model: nn.Module) -> float:
    expected = model.state_dict()
    assert set(arrays) == set(expected)
    return max(
        float(np.abs(arrays[name].numpy() - tensor.numpy()).max())
        for name, tensor in expected.items()
    )


def steps_in(record: ArrayRecord) -> set[float]:
    return {float(record[name].numpy()) for name in record if name.startswith("step/")}


# --- against plain PyTorch


@pytest.mark.parametrize("kept_in", ["object", "state", "bytes"])
def test_keep_equals_one_torch_loop(kept_in: str) -> None:
    sgd, arrays, model = adamw_of(), start(), model_of()
    given = None if kept_in == "object" else RecordDict()
    optimizer = torch_adamw(model)
    for server_round in range(1, ROUNDS + 1):
        if kept_in == "bytes":  # as Flower's engines do: another process, a state of plain arrays
            message = over_the_wire(Message(given, 1, "train"))
            sgd, given = adamw_of(), RecordDict(dict(message.content))
        order = order_of(server_round, arrays)
        arrays = sgd.run(order, given).arrays
        torch_steps(model, optimizer, order)
        assert furthest(arrays, model) < 1e-6
    assert furthest(start(), model) > 0.1  # it has moved
    if given is not None:
        kept = given.array_records["momentum"]
        assert set(kept) == NAMES
        assert steps_in(kept) == {float(STEPS * ROUNDS)}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_average_of_equal_workers_equals_one_torch_loop(num_workers: int) -> None:
    workers = [adamw_of() for _ in range(num_workers)]
    shape, arrays, momentum = ModelShape(start()), start(), None
    model = model_of()
    optimizer = torch_adamw(model)
    weights = [1 / num_workers] * num_workers
    for server_round in range(1, ROUNDS + 1):
        order = order_of(server_round, arrays, momentum_policy="average", momentum=momentum)
        reports = [sent(worker, order) for worker in workers]
        arrays = view_record(weighted_average([shape.checked(r.arrays) for r in reports], weights))
        states = [shape.checked_momentum(r.momentum or ArrayRecord()) for r in reports]
        assert [set(state) for state in states] == [NAMES] * num_workers
        momentum = view_record(weighted_average(states, weights))
        torch_steps(model, optimizer, order)
        assert furthest(arrays, model) < 1e-6
    assert momentum is not None
    assert steps_in(momentum) == {float(STEPS * ROUNDS)}


def sent(worker: LocalSGD, order: TrainOrder) -> TrainReport:
    message = over_the_wire(Message(order.to_records(), 1, "train"))
    report = worker.run(TrainOrder.from_message(message))
    return TrainReport.from_content(over_the_wire(report.to_reply(message)).content, order)


def test_counters_are_float32_and_may_be_a_fraction() -> None:
    """Workers of 32 and 8 steps have 27.2 in the mean: the next correction lies between."""
    for dtype in (torch.float64, torch.float32):  # in which torch would keep them
        torch.set_default_dtype(dtype)
        try:
            sgd = adamw_of()
            momentum = sgd.run(order_of(1, start(), momentum_policy="average")).momentum
        finally:
            torch.set_default_dtype(torch.float32)
        assert momentum is not None
        assert momentum["step/0.weight"].numpy().dtype == np.float32
    for name in momentum:
        if name.startswith("step/"):
            momentum[name].numpy()[...] = 27.2
    order = order_of(2, start(), momentum_policy="average", momentum=momentum)
    report = sgd.run(order)
    assert report.momentum is not None
    assert steps_in(report.momentum) == {float(np.float32(27.2) + STEPS)}
    assert steps_in(momentum) == {float(np.float32(27.2))}  # the order is left alone
    for name in ("step/0.weight", "step/0.bias", "step/2.weight", "step/2.bias"):
        del momentum[name]  # moments without their counter begin with zero
    first = adamw_of().run(order_of(2, start(), momentum_policy="reset")).arrays
    assert same_bits(sgd.run(order).arrays, first)


# --- where it is kept


def test_keep_works_in_the_memory_of_the_state() -> None:
    """The optimizer and the record of its state share memory."""
    sgd, state = adamw_of(), RecordDict()
    sgd.run(order_of(1, start()), state)
    kept = state.array_records["momentum"]
    moved = state["momentum"] = flat_like(kept)
    memories = {name: array.numpy() for name, array in moved.items()}
    for name, memory in memories.items():
        memory[...] = kept[name].numpy()
    for server_round in (2, 3):
        sgd.run(order_of(server_round, start()), state)
        found = state.array_records["momentum"]
        assert all(np.shares_memory(found[name].numpy(), memories[name]) for name in memories)
        assert steps_in(found) == {float(STEPS * server_round)}
    kept_by_torch = [t for kept in sgd._step.optimizer.state.values() for t in kept.values()]
    addresses = {memory.__array_interface__["data"][0] for memory in memories.values()}
    assert {tensor.data_ptr() for tensor in kept_by_torch} == addresses


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_state_of_a_checkpoint_gets_the_strides_of_its_parameter(optimizer: str) -> None:
    """Fused optimizers go through memory in order, and arrays that travelled are contiguous."""
    plain, strided = (
        LocalSGD(small_model(), images(), optimizer=optimizer, channels_last=channels_last)
        for channels_last in (False, True)
    )
    state = RecordDict()
    plain.run(image_order(1), state)
    travelled = view_record({n: a.numpy() for n, a in state.array_records["momentum"].items()})
    order = image_order(2, momentum=travelled)
    expected, found = plain.run(order, state), strided.run(order, RecordDict())
    assert close(found, expected)
    for parameter, kept in strided._step.optimizer.state.items():
        strides = {t.stride() for t in kept.values() if t.shape == parameter.shape}
        assert strides == {parameter.stride()}
    assert not strided.model[0].weight.is_contiguous()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fused_equals_the_default(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """Two nodes share the optimizer by turns. The fused one is that of CUDA."""
    settings: Any = {"optimizer": optimizer, "weight_decay": DECAY, "nesterov": True}
    plain = LocalSGD(model_of(), data(), **settings)
    monkeypatch.setattr(local_sgd, "can_fuse", lambda model, device: True)
    fused = LocalSGD(model_of(), data(), **settings)
    states = [RecordDict(), RecordDict()], [RecordDict(), RecordDict()]
    momentum: ArrayRecord | None = None
    for server_round, policy in enumerate(["keep"] * 3 + ["reset"] + ["average"] * 2, start=1):
        order = order_of(server_round, start(), momentum_policy=policy, momentum=momentum)
        ours, expected = (
            sgd.run(order, nodes[server_round % 2])
            for sgd, nodes in zip((fused, plain), states, strict=True)
        )
        assert close(ours, expected)
        if policy == "average":
            assert ours.momentum is not None
            assert expected.momentum is not None
            assert closely(ours.momentum, expected.momentum)
            momentum = view_record({n: a.numpy() / 2 for n, a in expected.momentum.items()})
            for name in [name for name in momentum if "2.weight" in name]:
                del momentum[name]  # what it lacks begins with zero
    for one, other in zip(*states, strict=True):
        assert closely(one.array_records["momentum"], other.array_records["momentum"])


def test_counter_of_a_capturable_optimizer_is_on_the_device_of_its_parameter() -> None:
    """Or else torch refuses the next step."""
    model, on_device = model_of(), model_of().to("meta")
    optimizer = torch_adamw(model)
    torch_steps(model, optimizer, order_of(1, start()))
    capturable = torch.optim.AdamW(on_device.parameters(), capturable=True)
    OptimizerState(on_device, capturable).load(OptimizerState(model, optimizer).record())
    assert {state["step"].device.type for state in capturable.state.values()} == {"meta"}


def test_momentum_of_another_optimizer_is_zero() -> None:
    for other, own in (("sgd", "adamw"), ("adamw", "sgd")):
        state, order = RecordDict(), order_of(2, start())
        LocalSGD(model_of(), data(), optimizer=other).run(order_of(1, start()), state)
        found = LocalSGD(model_of(), data(), optimizer=own).run(order, state).arrays
        assert same_bits(found, LocalSGD(model_of(), data(), optimizer=own).run(order).arrays)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_state_that_a_node_has_changed_or_set_back_is_loaded(optimizer: str) -> None:
    def copied() -> RecordDict:
        return RecordDict(dict(over_the_wire(Message(node, 1, "train")).content))

    def trained_from(state: RecordDict) -> ArrayRecord:
        own = LocalSGD(model_of(), data(), optimizer=optimizer)
        return own.run(order_of(2, start()), state).arrays

    sgd, node = LocalSGD(model_of(), data(), optimizer=optimizer), RecordDict()
    sgd.run(order_of(1, start()), node)
    older, expected = copied(), trained_from(copied())
    assert same_bits(sgd.run(order_of(2, start()), node).arrays, expected)
    node["momentum"] = older["momentum"]  # as an engine does after a failed call
    assert same_bits(sgd.run(order_of(2, start()), node).arrays, expected)
    momentum = node.array_records["momentum"]
    first = next(iter(momentum))
    momentum[first] = Array(1 + momentum[first].numpy())
    expected = trained_from(copied())
    assert same_bits(sgd.run(order_of(2, start()), node).arrays, expected)


# --- what overflows


def by_inputs(inputs: Tensor, **settings: Any) -> LocalSGD:
    """Return w x, whose loss is the output: the gradient of a sample is its input."""
    model = nn.Linear(1, 1, bias=False)
    return LocalSGD(
        model, (inputs[:, None], inputs), lambda outputs, _: outputs.flatten(), **settings
    )


ONE, SQUARE_OVERFLOWS, SUM_OVERFLOWS = range(3)
OVERFLOWING = torch.tensor([1.0, 1e25, 3e38])


def order_from_zero(*indices: int, policy: str = "keep", rate: float = 0.5) -> TrainOrder:
    zero = ArrayRecord({"weight": Array(np.zeros((1, 1), np.float32))})
    return order_for(zero, indices, 1, learning_rate=rate, momentum_policy=policy)


@pytest.mark.parametrize("kept_in", ["object", "state", "bytes"])
@pytest.mark.parametrize(
    ("optimizer", "overflows", "model_is_finite"),
    [("sgd", SUM_OVERFLOWS, False), ("adamw", SQUARE_OVERFLOWS, True)],
)
def test_momentum_that_is_not_finite_is_never_kept(
    optimizer: str, overflows: int, model_is_finite: bool, kept_in: str
) -> None:
    sgd = by_inputs(OVERFLOWING, optimizer=optimizer)
    state = None if kept_in == "object" else RecordDict()
    fresh = sgd.run(order_from_zero(ONE), state)
    assert fresh.momentum_zeroed == 0
    if kept_in == "bytes":  # as Flower's engines do
        state = RecordDict(dict(over_the_wire(Message(state, 1, "train")).content))
    for _ in range(2):
        overflown = sgd.run(order_from_zero(overflows, overflows), state)
        assert overflown.momentum_zeroed == 1
        assert np.isfinite(overflown.arrays["weight"].numpy()).all() == model_is_finite
        if state is not None:
            kept = state.array_records["momentum"].values()
            assert all((array.numpy() == 0).all() for array in kept)
    again = sgd.run(order_from_zero(ONE), state)
    assert (again.momentum_zeroed, again.arrays) == (0, fresh.arrays)  # as with zero momentum


def test_momentum_that_is_not_finite_is_not_sent_to_be_averaged() -> None:
    sgd = by_inputs(OVERFLOWING, optimizer="adamw")
    report = sgd.run(order_from_zero(SQUARE_OVERFLOWS, policy="average"))
    assert (report.momentum_zeroed, report.momentum) == (1, None)
    reply = sent(sgd, order_from_zero(SQUARE_OVERFLOWS, policy="average"))
    assert (reply.momentum_zeroed, reply.momentum) == (1, None)
    assert np.isfinite(reply.arrays["weight"].numpy()).all()  # so its model counts
    reset = sgd.run(order_from_zero(SQUARE_OVERFLOWS, policy="reset"))
    assert reset.momentum_zeroed == 0  # nothing of it would be kept


def test_momentum_whose_squares_overflow_is_finite_and_kept() -> None:
    sgd = by_inputs(OVERFLOWING)
    assert sgd.run(order_from_zero(SQUARE_OVERFLOWS)).momentum_zeroed == 0
    weight = sgd.run(order_from_zero(ONE)).arrays["weight"].numpy()
    assert weight == pytest.approx(-0.5 * 0.9e25)


# --- custom optimizers


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a rate for each layer, and a state that we have no names for."""
    first, _, last = model  # type: ignore[misc]
    groups = [{"params": first.parameters(), "lr": 0.001}, {"params": last.parameters()}]
    return torch.optim.RMSprop(groups, lr=0.01, momentum=0.5)


def test_custom_optimizer_is_that_of_plain_torch_also_in_another_process() -> None:
    """The rate of the schedule multiplies its own; here it falls by half in each round."""
    kept, expected, context = LocalSGD(model_of(), data(), optimizer=grouped), model_of(), None
    plain = grouped(expected)
    arrays = again = start()
    context = RecordDict()
    shape = ModelShape(start())
    for server_round, factor in ((1, 1.0), (2, 0.5), (3, 0.25)):
        order = order_of(server_round, arrays, learning_rate=factor)
        for group, rate in zip(plain.param_groups, (0.001, 0.01), strict=True):
            group["lr"] = factor * rate
        torch_steps(expected, plain, order)
        arrays = kept.run(order).arrays
        fresh = LocalSGD(model_of(), data(), optimizer=grouped)
        again = fresh.run(order_of(server_round, again, learning_rate=factor), context).arrays
        assert same_bits(arrays, again)
        assert shape.checked_momentum(context["momentum"]).keys() == context["momentum"].keys()
    for name, tensor in expected.state_dict().items():
        assert arrays[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-5)


@pytest.mark.parametrize("raises", [False, True])
def test_state_of_a_custom_optimizer_that_is_not_finite_is_given_up(raises: bool) -> None:
    """Neither by the object nor by the node, whose record refers to the same tensors."""
    sgd, node = LocalSGD(model_of(), data(), optimizer=grouped), RecordDict()
    sgd.run(order_of(1, start()), node)
    infinite = order_of(2, start(), sample_weights=np.full(len(order_of(2, start()).indices), 1e38))
    if raises:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_sgd.SentTensors, "record", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sgd.run(infinite, node)
    else:
        assert sgd.run(infinite, node).momentum_zeroed == 1
        assert "momentum" not in node
    report = sgd.run(order_of(3, start()), node)
    assert report.momentum_zeroed == 0
    assert all(np.isfinite(array.numpy()).all() for array in report.arrays.values())


def test_peak_of_the_schedule_gives_a_custom_optimizer_its_own_rates() -> None:
    whole = LocalSGD(model_of(), data(), optimizer=grouped)
    of_peak = LocalSGD(model_of(), data(), optimizer=grouped, peak_learning_rate=0.05)
    reports = [
        sgd.run(order_of(1, start(), learning_rate=rate))
        for sgd, rate in ((whole, 0.5), (of_peak, 0.025))
    ]
    assert same_bits(reports[0].arrays, reports[1].arrays)


class Counting(torch.optim.SGD):
    """Keeps a list."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["counts"] = [1]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda model: "adam", "returned a str, expected a torch.optim.Optimizer"),
        (
            lambda model: torch.optim.Adam(model_of().parameters()),
            "4 of its 4 parameters are not the model's",
        ),
    ],
)
def test_custom_optimizer_that_cannot_be_used_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LocalSGD(model_of(), data(), optimizer=make)


def test_state_that_is_neither_a_tensor_nor_a_number_is_refused() -> None:
    sgd = LocalSGD(model_of(), data(), optimizer=lambda model: Counting(model.parameters()))
    with pytest.raises(ValueError, match="the state 'counts' of Counting is a list"):
        sgd.run(order_of(1, start()), RecordDict())
