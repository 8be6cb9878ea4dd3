"""`baton serve --ray --autoscale`: an instance more while the load presses, one less when few would do."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from random import Random

import pytest

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.placing.placement import Placement, make_placing
from baton.launch.placing.spec import Placed
from baton.launch.planning.arranging import check_autoscale, make_arranger
from baton.protocol.rules.cluster_secret import NO_SECRETS

PROMISE = ("--slo", "ttft:2000 itl:400")
COST = "0.002,0.001,0.02"  # (as in tests/e2e/test_auto_labels.py)


@pytest.mark.timeout(900)
def test_an_instance_comes_and_goes_with_the_load(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="`make deploy-check` installs it")
    from tests.deploy.ray_server import Server, processes_of, ray_cluster
    from tests.e2e.test_auto_labels import complete, load

    flags = ("--executor", "simulated", "--simulated-cost", COST, "--max-model-len", "1024")
    with ray_cluster(2) as cluster:
        server = Server(cluster.address, tmp_path, *flags, *PROMISE, "--mixed", "1", "--autoscale", "1:2")
        try:
            server.until_ready()
            assert server.ready() == ["mixed-0"]
            with load(server, clients=24, prompt=400, tokens=8):
                server.until(lambda: len(server.ready()) == 2)
                arranging = server.instances()["arranging"]
                (change,) = arranging["changes"]
                assert arranging["bounds"] == [1, 2]
                assert (change["what"], change["name"]) == ("add", sorted({*server.ready()} - {"mixed-0"})[0])
                assert "press more than" in change["why"]
                assert f"it will be {change['name']}" in server.log.read_text()
                server.until(lambda: every_instance_has_work(server))
            random, began = Random(1), time.monotonic()
            for seconds in itertools.count():  # (little, so that instances report)
                complete(server, random, 8, 2)
                if len(processes_of(server.port)) == 1 and len(server.instances()["instances"]) == 1:
                    break
                assert time.monotonic() < began + 600, (seconds, server.instances())
                time.sleep(0.5)
            change = server.instances()["arranging"]["changes"][0]
            assert change["what"] == "drain"
            assert server.instances()["unplaced"] == []
            assert f"drain {change['name']}" in server.log.read_text()
        finally:
            server.close()
        assert processes_of(server.port) == []


def every_instance_has_work(server) -> bool:
    return all(one["in_flight"] for one in server.instances()["instances"])


# -- without Ray


def test_without_ray_it_says_what_to_do() -> None:
    with pytest.raises(OptionError, match=r"--autoscale 1:4: needs --ray.*baton scale --watch"):
        check_autoscale(ServeOptions(autoscale="1:4"), 1)
    with pytest.raises(OptionError, match=r"--autoscale 2:4: 1 are started .* let these be 2 to 4"):
        check_autoscale(ServeOptions(autoscale="2:4", ray="auto", mixed=1), 1)
    check_autoscale(ServeOptions(autoscale="2:4", ray="auto", prefill=1, decode=1), 2)
    check_autoscale(ServeOptions(), 1)


def test_what_the_flags_let_it_decide() -> None:
    assert make_arranger(ServeOptions()) is None
    number = make_arranger(ServeOptions(autoscale="2:4", slo="ttft:500"))
    assert number is not None
    assert (number.rules.bounds, number.rules.labels, number.rules.slo.ttft_s) == ((2, 4), False, 0.5)
    both = make_arranger(ServeOptions(autoscale="2:4", auto_labels=True))
    assert both is not None
    assert both.rules.labels


def test_a_name_is_not_used_again() -> None:
    """Gateways and engines would take the new instance for the old one, that was to drain."""
    options = ServeOptions(ray="auto", prefill=1, decode=1)
    first = (Placed("prefill-0", "prefill"), Placed("decode-0", "decode"))
    placement = Placement(make_placing(options, first, 1, NO_SECRETS))
    assert placement.add("decode") == "decode-1"
    placement.remove("decode-1")
    assert placement.names == {"prefill-0", "decode-0"}
    assert placement.add("decode") == "decode-2"
    assert placement.add("mixed") == "mixed-0"
    assert placement.names == {"prefill-0", "decode-0", "decode-2", "mixed-0"}
