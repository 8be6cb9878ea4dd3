"""`--auto-labels` and `--autoscale`: from the flags to what decides."""

from __future__ import annotations

from baton.gateway.arranging.arranger import Arranger, Rules
from baton.gateway.arranging.slo import Slo, read_bounds, read_slo
from baton.launch.limits import OptionError
from baton.launch.options import ArrangingOptions, ServeOptions


def promised(options: ArrangingOptions) -> Slo:
    return Slo() if options.slo is None else read_slo(options.slo)


def make_arranger(options: ArrangingOptions) -> Arranger | None:
    """None: nothing is to be decided."""
    if not options.auto_labels and options.autoscale is None:
        return None
    bounds = None if options.autoscale is None else read_bounds(options.autoscale)
    return Arranger(Rules(slo=promised(options), labels=options.auto_labels, bounds=bounds))


def check_autoscale(options: ServeOptions, instances: int) -> None:
    """`instances`: as many are started at first.  Raises `OptionError`."""
    if options.autoscale is None:
        return
    if options.ray is None:
        raise OptionError(
            f"--autoscale {options.autoscale}: needs --ray, which starts instances on other machines; those "
            "of one server share its cores, so more of them bear no more. Where instances are started "
            "otherwise, add and drain them as `baton scale --watch` says"
        )
    least, most = read_bounds(options.autoscale)
    if not least <= instances <= most:
        raise OptionError(
            f"--autoscale {options.autoscale}: {instances} are started by --prefill, --decode and --mixed; "
            f"let these be {least} to {most} together"
        )
