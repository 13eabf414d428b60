"""Horovod scripts, unchanged, on ``torch.distributed``.

Offers ``ronde.horovod.torch``, Horovod's interface for PyTorch, and :func:`run`, its launcher as a
function. Under ``ronde run --horovod``, ``import horovod.torch`` finds it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["run"]

__version__ = "0.28.1"  # of Horovod: scripts compare it


def run(
    func: Any,
    args: Any = (),
    kwargs: Any = None,
    num_proc: int | None = None,
    np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function on several processes of this machine, as ``horovod.run`` does.

    Args:
        func: what every process calls.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: how many processes; also ``np``.
        options: Horovod's others. ``hosts``, ``hostfile`` and what makes a job elastic are refused;
            the rest has no meaning here.

    Returns:
        list: what the function returned, by rank.

    Raises:
        ArgumentError: an option is refused.
    """
    import os
    import warnings

    from ronde.launch.call import launch
    from ronde.world import ArgumentError

    refused = [
        k for k in ("hosts", "hostfile", "host_discovery_script") if options.get(k) is not None
    ]
    if refused:
        raise ArgumentError(
            f"horovod.run({refused[0]}=…): functions run on this machine only. Start the script "
            "on several with ronde run --horovod --hosts."
        )
    if ignored := sorted(k for k, v in options.items() if v):
        warnings.warn(f"horovod.run: ignored {', '.join(ignored)}", stacklevel=2)
    before = os.environ.get("RONDE_HOROVOD")
    os.environ["RONDE_HOROVOD"] = "1"  # workers then find the bridge as `horovod`
    try:
        return launch(func, args, kwargs, workers=num_proc or np or 1)
    finally:
        if before is None:
            del os.environ["RONDE_HOROVOD"]
        else:
            os.environ["RONDE_HOROVOD"] = before
