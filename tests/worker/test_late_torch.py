"""The token loop with the Torch executor one step late, on a device that delays (`late_torch`): it is right,
and what would be wrong about the order of things is found."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton.executor.devices.graphs import DecodeGraphs
from baton.executor.streams import mirror
from baton.executor.streams.staging import Staging
from baton.executor.torch_late import LateTorchExecutor, _Launched, _Shown
from tests.executor.delayed import DelayedEvent, DelayedQueue

from .late_torch import Bench


@pytest.fixture(scope="module", params=["eager", "graphs"])
def bench(tmp_path_factory, request):
    with pytest.MonkeyPatch.context() as patch:
        yield Bench(tmp_path_factory.mktemp("late"), patch, request.param == "graphs")


BUDGETS, EAGER = st.sampled_from([3, 8, 64]), st.sampled_from([0.0, 0.3, 0.7])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), budget=BUDGETS, eager=EAGER)
def test_whatever_crosses_every_epoch_gets_its_tokens_and_one_true_closing(bench, data, budget, eager):
    bench.run(data, budget, eager)


def tokens_are_read_before_the_event(patch, bench):
    def result(flight):
        flight.over = DelayedEvent(bench.queue)
        flight.over.recorded = True
        return true(flight)

    true = _Launched.result
    patch.setattr(_Launched, "result", result)


def events_are_passed_as_soon_as_they_are_made(patch, bench):
    def event(queue):
        made = DelayedEvent(queue)
        made.recorded = True
        return made

    patch.setattr(DelayedQueue, "event", event)


def pinned_memory_is_written_again_before_it_was_read(patch, bench):
    def begin(staging):
        staging._slabs[:] = staging._slabs[:1] * len(staging._slabs)
        staging._slabs[0].read = None
        true(staging)

    true = Staging.begin
    patch.setattr(bench.executor._staging, "_slabs", list(bench.executor._staging._slabs))
    patch.setattr(Staging, "begin", begin)


def tokens_of_all_steps_come_back_to_one_place(patch, bench):
    patch.setattr(bench.executor, "_returns", bench.executor._returns[:1])


def a_step_that_waits_does_not_wait(patch, bench):
    def compute(executor, batch):
        flights, executor._flights = executor._flights, ()
        try:
            return true(executor, batch)
        finally:
            executor._flights = flights

    true = LateTorchExecutor._compute
    patch.setattr(LateTorchExecutor, "_compute", compute)


def layers_are_told_when_the_step_is_launched(patch, bench):
    def ahead(executor, batch, on_layers):
        flight = true(executor, batch, on_layers)
        for part in flight.shown:
            if part.told:
                on_layers(part.stop)
        flight.on_layers = None
        return flight

    true = LateTorchExecutor._ahead
    patch.setattr(LateTorchExecutor, "_ahead", ahead)


def layers_are_told_before_they_were_copied(patch, bench):
    patch.setattr(_Shown, "wait", lambda part: part.final.wait())


def layers_are_told_before_anything_is_waited_for(patch, bench):
    def result(flight):
        for part in flight.shown:
            if part.told:
                flight.on_layers(part.stop)
        flight.on_layers = None
        return true(flight)

    true = _Launched.result
    patch.setattr(_Launched, "result", result)


def what_is_shown_waits_for_nothing(patch, bench):
    patch.setattr(DelayedQueue, "behind", lambda queue, event: None)


def what_is_shown_waits_for_an_event_that_is_not_recorded_yet(patch, bench):
    true = DelayedQueue.behind
    patch.setattr(DelayedQueue, "behind", lambda queue, event: true(queue, DelayedEvent(event.queue)))


def the_end_of_a_step_is_recorded_before_its_tokens_are_copied(patch, bench):
    def ahead(executor, batch, on_layers):
        flight = true(executor, batch, on_layers)
        if len(flight.slots):
            ends[flight.tokens.data_ptr()] = flight.over
        return flight

    def copy(tensor, *given, **how):
        if tensor.data_ptr() in ends:
            ends.pop(tensor.data_ptr()).record()
        return true_copy(tensor, *given, **how)

    ends = {}
    true, true_copy = LateTorchExecutor._ahead, torch.Tensor.copy_
    patch.setattr(LateTorchExecutor, "_ahead", ahead)
    patch.setattr(torch.Tensor, "copy_", copy)


def a_full_block_is_not_copied(patch, bench):
    def shown_by(batch, block_size):
        return true(batch, block_size)[:-1]

    true = mirror.shown_by
    patch.setattr(mirror, "shown_by", shown_by)


def recording_a_graph_leaves_its_tokens(patch, bench):
    def record(graphs, graph):
        return graphs._recorder.record(lambda: graphs._step(graph))

    if bench.executor._graphs is None:
        pytest.skip("of graphs")
    patch.setattr(DecodeGraphs, "_record", record)


@pytest.mark.parametrize(
    "plant",
    [
        tokens_are_read_before_the_event,
        events_are_passed_as_soon_as_they_are_made,
        pinned_memory_is_written_again_before_it_was_read,
        tokens_of_all_steps_come_back_to_one_place,
        a_step_that_waits_does_not_wait,
        layers_are_told_when_the_step_is_launched,
        layers_are_told_before_they_were_copied,
        layers_are_told_before_anything_is_waited_for,
        what_is_shown_waits_for_nothing,
        what_is_shown_waits_for_an_event_that_is_not_recorded_yet,
        the_end_of_a_step_is_recorded_before_its_tokens_are_copied,
        a_full_block_is_not_copied,
        recording_a_graph_leaves_its_tokens,
    ],
)
def test_a_wrong_order_is_found(plant, bench):
    @settings(max_examples=300, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(data=st.data(), budget=BUDGETS, eager=EAGER)
    def scripts(data, budget, eager):
        bench.run(data, budget, eager)

    with pytest.MonkeyPatch.context() as patch:
        plant(patch, bench)
        with pytest.raises(Exception):  # noqa: B017  (whichever check sees it first)
            scripts()
