"""Every flag, once: what it is called, what it takes, its default, its bounds, what it means.

| file | what |
| --- | --- |
| `engine.py`, `speculation.py`, `cluster.py`, `arranging.py`, `server.py` | the declarations |
| `flag.py` | what a declaration says, and how a value is read and checked |
| `sources.py` | command line > environment > config file > default, and errors in the user's spelling |
| `config_file.py` | YAML and TOML |
| `document.py` | `docs/flags.md` |

The command line (`cli/flags.py`), the arguments of `LLM` and `/server_info` are derived from these.  A new
flag is one entry here, and what acts on it takes its value from the group.  Nothing here imports what is
slow.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.launch.options.arranging import ArrangingOptions
from baton.launch.options.cluster import ClusterOptions, JoinOptions, NodesOptions, PlacingOptions
from baton.launch.options.engine import EngineOptions
from baton.launch.options.flag import Options, flags_of
from baton.launch.options.server import HttpOptions, RightsOptions, ServerOptions, UserOptions

__all__ = [
    "ArrangingOptions",
    "ClusterOptions",
    "EngineOptions",
    "HttpOptions",
    "JoinOptions",
    "NodesOptions",
    "Options",
    "PlacingOptions",
    "RightsOptions",
    "ServeOptions",
    "ServerOptions",
    "UserOptions",
    "flags_of",
]


@dataclass(frozen=True)
class ServeOptions(
    EngineOptions,
    ClusterOptions,
    PlacingOptions,
    NodesOptions,
    JoinOptions,
    ArrangingOptions,
    ServerOptions,
    RightsOptions,
    HttpOptions,
    UserOptions,
):
    """Every flag of `baton serve`, and so every flag there is."""

    @property
    def runs_none(self) -> bool:
        return self.ray is not None or super().runs_none
