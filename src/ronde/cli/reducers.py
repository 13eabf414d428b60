"""Options of ``ronde run`` that say how gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ronde.cli.options import option
from ronde.world import ArgumentError

if TYPE_CHECKING:
    from ronde.launch import ReductionServers

__all__ = ["ReducerOption", "ServersOption", "check_reducer", "servers_of"]

ReducerOption = Annotated[
    str | None,
    option(
        "--reducer",
        "How to average gradients: ring, hierarchical, servers, auto, bf16, topk:0.01, … "
        "Overrides the plan's.",
        "NAME",
    ),
]
ServersOption = Annotated[
    str | None,
    option(
        "--servers",
        "Start servers that sum gradients: N on this machine, or one on each of these hosts. "
        "Implies --reducer servers.",
        "N|a,b",
    ),
]


def check_reducer(reducer: str | None, servers: str | None, planned_by: str | None) -> str | None:
    """Check ``--reducer`` before anything starts. Returns it, or what ``--servers`` implies."""
    from ronde.plan import parse_reducer

    if reducer is not None:
        reducer = str(parse_reducer(reducer))
    elif servers is not None and "reducer=" not in (planned_by or ""):
        reducer = "servers"
    if servers and reducer is not None and reducer.split(":")[0] not in ("servers", "auto"):
        raise ArgumentError(
            f"--servers starts servers that --reducer {reducer} does not use: give --reducer "
            "servers or auto."
        )
    return reducer


def servers_of(servers: str | None, places: Any) -> ReductionServers:
    """The servers that ``--servers`` asks for, which end with the block."""
    from ronde.launch import ReductionServers

    away = places is not None
    return ReductionServers(
        servers, places.engine if away else None, places.python if away else None, away
    )
