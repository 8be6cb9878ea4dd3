from tests.gateway.conftest import byte_level

__all__ = ["byte_level"]
