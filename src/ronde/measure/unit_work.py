"""Count what decides a unit's time on a device: floating-point operations, operators, memory
traffic, attention, and products that tensor cores cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ronde.measure.storage_ledger import bytes_of
from ronde.profile.monkeypatch import put
from ronde.world.tensors import tensors_in

_HALF = (torch.bfloat16, torch.float16)


@dataclass
class UnitWork:
    """One unit's forward pass at one micro-batch size.

    Attributes:
        flops: floating-point operations, without those that a causal mask leaves out.
        operations: operators dispatched.
        moved: bytes read and written by all that are not matrix products.
        attention: operations of fused attention, without the half that a causal mask leaves out.
        vector: operations of products outside tensor cores.
    """

    flops: float = 0.0
    operations: int = 0
    moved: float = 0.0
    attention: float = 0.0
    vector: float = 0.0


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of each unit.

    ``torch.nn.functional.scaled_dot_product_attention`` counts as one fused kernel, as it is on a
    GPU, whatever the CPU makes of it.
    """

    def __init__(self, units: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units = [UnitWork() for _ in range(units)]
        self.unit = 0
        self._inside = False
        self._single = torch.get_float32_matmul_precision() == "highest"
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> WorkCounter:
        fused = lambda f: lambda *args, **named: self._attend(f, *args, **named)  # noqa: E731
        self._undo = put(F, "scaled_dot_product_attention", fused)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo()

    def _attend(
        self, plain: Callable[..., Any], query: Any, key: Any, value: Any, *rest: Any, **named: Any
    ) -> Any:
        work = self.units[self.unit]
        causal = bool(named.get("is_causal") or (len(rest) > 2 and rest[2]))
        pairs = float(query.numel() // query.shape[-1] * key.shape[-2])
        whole = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
        done = whole / 2.0 if causal else whole
        work.operations += 1
        work.flops -= whole - done
        if query.dtype in _HALF or torch.is_autocast_enabled(query.device.type):
            work.attention += done
        elif self._single:
            work.vector += done
        self._inside = True
        try:
            return plain(query, key, value, *rest, **named)
        finally:
            self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") != "prim":
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        work = self.units[self.unit]
        packet = getattr(func, "_overloadpacket", None)
        name = getattr(packet, "__name__", "")
        flops = 0.0
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
        elif "rnn" in name:  # torch's own counter does not know recurrent layers
            weights = [t for t in tensors_in(args[1:5]) if t.dim() == 2]
            rows = args[0].numel() // args[0].shape[-1]  # of packed sequences too
            flops = 2.0 * rows * sum(t.numel() for t in weights)
        work.flops += flops
        if self._inside:
            return
        work.operations += 1
        if packet in flop_registry:
            given = [a for a in args if isinstance(a, torch.Tensor)]
            single = given[-1].dtype not in _HALF and self._single
            sides = (given[-2].shape[-1], given[-1].shape[-1]) if name.endswith("mm") else ()
            # tensor cores need rows of 16 bytes
            if single or any(side % 8 for side in sides):
                work.vector += flops
            # results of batched products are as large as attention's scores
            if name not in ("bmm", "baddbmm"):
                return
        unmoved = getattr(func, "is_view", False) or name.startswith(("empty", "_unsafe_view"))
        if not unmoved:
            work.moved += sum(bytes_of(t) for t in tensors_in((args, kwargs, result)))
