"""`--auto-labels`: from the flags to what decides."""

from __future__ import annotations

from baton.gateway.arranging.arranger import Arranger, Rules
from baton.gateway.arranging.slo import Slo, read_slo
from baton.launch.options import ArrangingOptions


def promised(options: ArrangingOptions) -> Slo:
    return Slo() if options.slo is None else read_slo(options.slo)


def make_arranger(options: ArrangingOptions) -> Arranger | None:
    """None: nothing is to be decided."""
    return Arranger(Rules(slo=promised(options))) if options.auto_labels else None
