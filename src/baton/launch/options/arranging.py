"""Flags of a cluster that arranges itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.gateway.arranging.slo import read_bounds, read_slo
from baton.launch.options.flag import Options, flag


@dataclass(frozen=True, kw_only=True)
class ArrangingOptions(Options):
    title: ClassVar[str] = "A cluster that arranges itself"

    auto_labels: bool = flag(
        False,
        "Let the server change labels of instances as the load changes, so that --slo is kept; needs two "
        "instances at least.",
    )
    slo: str | None = flag(
        None,
        "What clients are promised, in milliseconds: the time to the first token, and the mean time between "
        "tokens. For --auto-labels, --autoscale and `baton scale`.",
        metavar='"ttft:500 itl:50"',
        unset="nothing: only queues and room count",
        check=lambda text: text is None or read_slo(text),
    )
    autoscale: str | None = flag(
        None,
        "Let the server have more instances started, and drain some, within these bounds, as the load "
        "changes. Needs --ray; where instances are started otherwise, `baton scale` says the same as advice.",
        metavar="MIN:MAX",
        unset="their number stays",
        check=lambda text: text is None or read_bounds(text),
    )
