"""From flags to the instances of a server."""

import os

import pytest

from baton.launch.limits import OptionError
from baton.launch.options import ClusterOptions, ServeOptions
from baton.launch.planning.cluster_options import plan_instances
from baton.launch.planning.plan import make_plan


def names(**options) -> list[str]:
    plans = plan_instances(make_plan(ServeOptions()), ClusterOptions(**options))
    assert all(plan.config.name.startswith(plan.label) for plan in plans)
    return [plan.config.name for plan in plans]


def test_what_the_counts_mean():
    assert names() == ["mixed-0"]
    assert names(prefill=1, decode=2) == ["prefill-0", "decode-0", "decode-1"]
    assert names(mixed=2) == ["mixed-0", "mixed-1"]
    assert names(prefill=1, mixed=1) == ["prefill-0", "mixed-0"]
    assert names(mixed=0) == [], "a gateway for instances that join"


def test_instances_divide_the_machine():
    plan = make_plan(ServeOptions(tensor_parallel_size=2, executor="simulated"))
    (alone,) = plan_instances(plan, ClusterOptions())
    assert (alone.config.num_threads, alone.config.memory_shares) == (None, 1)
    cores = len(os.sched_getaffinity(0))
    for one in plan_instances(plan, ClusterOptions(prefill=1, decode=2)):
        assert one.config.num_threads == max(1, cores // 6)
        assert one.config.memory_shares == 3


def test_what_was_asked_for_is_for_each_instance():
    plan = make_plan(ServeOptions(num_threads=3, kv_cache_memory_bytes="1GiB"))
    for one in plan_instances(plan, ClusterOptions(prefill=1, decode=1)):
        assert (one.config.num_threads, one.config.kv_cache_memory_bytes) == (3, 1 << 30)


def test_the_flags_of_the_hand_over_reach_the_configuration():
    options = ClusterOptions(max_preparing=5, kv_lease=2.5, transfer="tcp", transfer_checksums=True)
    (one,) = plan_instances(make_plan(ServeOptions()), options)
    config = one.config
    assert (config.max_preparing, config.lease_s, config.transfer) == (5, 2.5, "tcp")
    assert config.transfer_checksums
    assert (config.peer_endpoint, config.transfer_host) == ("ipc://*", "127.0.0.1")


@pytest.mark.parametrize(
    ("peer_host", "transfer_host", "endpoint", "pages"),
    [
        ("127.0.0.2", None, "tcp://127.0.0.2:0", "127.0.0.2"),
        ("127.0.0.2", "127.0.0.3", "tcp://127.0.0.2:0", "127.0.0.3"),
        ("::1", None, "tcp://[::1]:0", "::1"),
    ],
)
def test_other_hosts(peer_host, transfer_host, endpoint, pages):
    options = ClusterOptions(peer_host=peer_host, transfer_host=transfer_host)
    (one,) = plan_instances(make_plan(ServeOptions()), options)
    assert (one.config.peer_endpoint, one.config.transfer_host) == (endpoint, pages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(prefill=-1), "--prefill -1: give a number"),
        (dict(decode=1000), "--decode 1000: give a number"),
        (dict(max_preparing=0), "--max-preparing 0: give requests from 1"),
        (dict(kv_lease=0.0), "--kv-lease 0: give seconds"),
        (dict(kv_lease=float("nan")), "--kv-lease nan: give seconds"),
        (dict(disaggregation_threshold=-1), "--disaggregation-threshold -1: give tokens from 0"),
        (dict(transfer="pigeon"), "--transfer pigeon: give one of auto, shared_memory, tcp, nixl"),
        (dict(peer_host="0.0.0.0"), "--peer-host 0.0.0.0: it means every address"),
        (dict(peer_host="192.0.2.7"), "--peer-host 192.0.2.7: not an address of this machine"),
        (dict(transfer_host="::"), "--transfer-host ::: it means every address"),
        (dict(peer_host="no.such.host.invalid"), "--peer-host no.such.host.invalid: "),
    ],
)
def test_mistakes_name_the_flag(options, words):
    with pytest.raises(OptionError) as error:
        names(**options)
    assert str(error.value).startswith(words)
