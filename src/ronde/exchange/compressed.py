"""Reducers that send less: 16 bits, the largest entries, low rank.

What a worker did not send is added to its next gradient (error feedback: Seide et al. 2014;
Karimireddy et al. 2019). Single parameters are compressed, not buckets: DDP orders its buckets anew
after the first step, and a resumed run must not depend on that.
"""

from __future__ import annotations

import hashlib
import math

import torch

from ronde.exchange.reducer import (
    Bucket,
    Members,
    Reducer,
    gather_rows,
    mean_into,
    scatter_rows,
    wide,
)
from ronde.plan.reducers import ReducerChoice

__all__ = ["LowRank", "SixteenBits", "TopK"]

_RESIDUAL = "residual"


class SixteenBits(Reducer):
    """``fp16`` and ``bf16``: half the bytes of float32. Sums are in float32, which PyTorch's hooks
    leave to the backend; fp16 is scaled by a power of two, so that it cannot overflow.
    """

    lanes = 2

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        super().__init__(choice, members)
        self.bucket_mib = choice.values[0]
        self._wire = torch.float16 if choice.name == "fp16" else torch.bfloat16

    def _encode(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Write float rows as a scale of 4 bytes and 16-bit values."""
        scale = torch.ones((), dtype=torch.float32, device=values.device)
        if self._wire is torch.float16:
            _, exponent = torch.frexp(values.abs().max())
            scale = torch.ldexp(scale, exponent)
        rows[:, :4] = scale.view(1).view(torch.uint8)
        rows[:, 4:].view(self._wire).copy_(values / scale.to(values.dtype))

    def _decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = rows[:, :4].contiguous().view(torch.float32)
        return rows[:, 4:].view(self._wire).to(dtype).mul_(scales.to(dtype))

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        flat, where, size = bucket.flat, bucket.where, self.members.size
        n, group, dtype = flat.numel(), where.groups["all"], wide(flat.dtype)
        shard = -(-n // size)
        padded = where.buffer("padded", flat, dtype, size, shard)
        padded.view(-1)[:n] = flat
        sent = where.buffer("sent", flat, torch.uint8, size, 4 + 2 * shard)
        received = where.buffer("received", flat, torch.uint8, size, 4 + 2 * shard)
        self._encode(padded, sent)
        mine = self._decode(scatter_rows(sent, received, group), dtype).sum(0).div_(size)
        row = where.buffer("row", flat, torch.uint8, 1, 4 + 2 * shard)
        self._encode(mine.view(1, -1), row)
        flat.copy_(self._decode(gather_rows(row, sent, group), dtype).view(-1)[:n])


class _Feedback(Reducer):
    """What reducers with error feedback share: a residual for each parameter."""

    def _with_residual(self, bucket: Bucket) -> None:
        """Add to each gradient what earlier steps did not send."""
        if self.choice.feedback:
            for grad, name in zip(bucket.grads, bucket.names, strict=True):
                if (residual := self.state.get(f"{name}/{_RESIDUAL}")) is not None:
                    grad.add_(residual)

    def _keep(self, name: str, residual: torch.Tensor) -> None:
        if self.choice.feedback:
            key = f"{name}/{_RESIDUAL}"
            if key in self.state:
                self.state[key].copy_(residual)
            else:
                self.state[key] = residual.clone()


class TopK(_Feedback):
    """The entries of largest magnitude of each parameter, with their places (Deep Gradient
    Compression: Lin et al. 2018). Bytes grow with the number of workers.
    """

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        flat, size, fraction = bucket.flat, self.members.size, self.choice.values[0]
        self._with_residual(bucket)
        values: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for grad, name in zip(bucket.grads, bucket.names, strict=True):
            k = math.ceil(fraction * grad.numel())
            place = grad.abs().topk(k, sorted=False).indices
            values.append(grad[place])
            places.append(place)
            residual = grad.clone()
            residual[place] = 0
            self._keep(name, residual)
        if not values:
            return
        counts = [len(v) for v in values]
        # values first: their bytes keep the places aligned
        mine = torch.cat([torch.cat(values).view(torch.uint8), torch.cat(places).view(torch.uint8)])
        everyone = mine.new_empty(size, len(mine))
        gather_rows(mine, everyone, bucket.where.groups["all"])
        bytes_of_values = sum(counts) * flat.element_size()
        for grad in bucket.grads:
            grad.zero_()
        for row in everyone:  # by rank: the same sum on every worker
            theirs = torch.split(row[:bytes_of_values].clone().view(flat.dtype), counts)
            where = torch.split(row[bytes_of_values:].clone().view(torch.int64), counts)
            for grad, value, place in zip(bucket.grads, theirs, where, strict=True):
                grad.index_add_(0, place, value, alpha=1 / size)


class LowRank(_Feedback):
    """PowerSGD (Vogels et al. 2019): a matrix M of a parameter is sent as P (m × r) and Q (n × r).

    PyTorch's hook chains its exchanges by callbacks, which crashes on gloo with several buckets.
    """

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        group, size, rank = (
            bucket.where.groups["all"],
            self.members.size,
            int(self.choice.values[0]),
        )
        dtype = wide(bucket.flat.dtype)
        self._with_residual(bucket)
        matrices: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, gradient, matrix
        plain: list[torch.Tensor] = []
        for grad, name, shape in zip(bucket.grads, bucket.names, bucket.shapes, strict=True):
            m = shape[0] if shape and grad.numel() else 1
            n = grad.numel() // m
            if rank * (m + n) < m * n:
                # A copy: products of unaligned views are rounded in another way, and where DDP
                # puts a gradient changes after its first step.
                matrices.append((name, grad, grad.to(dtype, copy=True).view(m, n)))
            else:
                plain.append(grad)
        ps = []
        for name, _, matrix in matrices:
            key = f"{name}/q"
            if key not in self.state:
                self.state[key] = _first_q(name, bucket.step, matrix, rank)
            ps.append(matrix @ self.state[key])
        self._mean([*ps, *plain], dtype, group, size)
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = [matrix.T @ p for (_, _, matrix), p in zip(matrices, ps, strict=True)]
        self._mean(qs, dtype, group, size)
        for (name, grad, matrix), p, q in zip(matrices, ps, qs, strict=True):
            self.state[f"{name}/q"].copy_(q)
            approximation = p @ q.T
            self._keep(name, (matrix - approximation).view(-1).to(grad.dtype))
            grad.copy_(approximation.view(-1))

    @staticmethod
    def _mean(tensors: list[torch.Tensor], dtype: torch.dtype, group: object, size: int) -> None:
        """Average tensors in place, in one exchange."""
        if not tensors:
            return
        packed = torch.cat([t.reshape(-1).to(dtype) for t in tensors])
        mean_into(packed, group, size)
        for t, mean in zip(tensors, torch.split(packed, [t.numel() for t in tensors]), strict=True):
            t.copy_(mean.view(t.shape))


def _first_q(name: str, step: int, matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Random columns that depend on the parameter and the step only: equal on all workers."""
    digest = hashlib.blake2b(repr((name, step, ())).encode(), digest_size=7).digest()
    draws = torch.Generator(matrix.device).manual_seed(int.from_bytes(digest, "little"))
    shape = (matrix.shape[1], rank)
    return torch.randn(shape, generator=draws, dtype=matrix.dtype, device=matrix.device)
