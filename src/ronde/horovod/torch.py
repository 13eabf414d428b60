"""Horovod's interface for PyTorch: ``import ronde.horovod.torch as hvd``."""

# ruff: noqa: F401, F403
from ronde.horovod import elastic
from ronde.horovod.bridge import HorovodInternalError
from ronde.horovod.collectives_api import *
from ronde.horovod.collectives_api import wait_for_all as barrier
from ronde.horovod.compression import Compression
from ronde.horovod.gradient_buckets import distributed_optimizer as DistributedOptimizer
from ronde.horovod.lifecycle import *
from ronde.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ronde.horovod.synced_batch_norm import SyncBatchNorm
from ronde.horovod.transfers import Reduction

Average = Reduction.Average
Sum = Reduction.Sum
Adasum = Reduction.Adasum
Min = Reduction.Min
Max = Reduction.Max
Product = Reduction.Product
