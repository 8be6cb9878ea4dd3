"""Settings of all tests: none of them may fail because the machine is slow or pauses."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
