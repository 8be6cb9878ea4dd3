"""`--auto-labels`: from the flags to what decides."""

from __future__ import annotations

from baton.gateway.arranging.arranger import Arranger, Rules
from baton.gateway.arranging.slo import Slo, read_slo
from baton.launch.options import ArrangingOptions


def make_arranger(options: ArrangingOptions) -> Arranger | None:
    """None: nothing is to be decided."""
    if not options.auto_labels:
        return None
    return Arranger(Rules(slo=Slo() if options.slo is None else read_slo(options.slo)))
