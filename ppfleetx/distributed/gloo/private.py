"""The private names of Paddle that the CPU backend stands on."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import paddle

from ppfleetx.distributed.version import check_paddle_version


class PrivateName(NamedTuple):
    """One private name: what it stands for here, and how to know that we no longer need it."""

    module: str
    name: str
    purpose: str
    can_go_when: str


def _gloo_methods(names: str, purpose: str, can_go_when: str) -> tuple[PrivateName, ...]:
    return tuple(
        PrivateName("paddle.base.core", f"ProcessGroupGloo.{name}", purpose, can_go_when) for name in names.split()
    )


def _mp_ops(names: str, purpose: str, can_go_when: str) -> tuple[PrivateName, ...]:
    module = "paddle.distributed.fleet.layers.mpu.mp_ops"
    return tuple(PrivateName(module, name, purpose, can_go_when) for name in names.split())


#: of groups.py
_GROUPS = (
    PrivateName(
        "paddle.base.core",
        "create_or_get_global_tcp_store",
        "replaced: gives Paddle the store that is open already; its own blocks without end for a rank that never comes",
        "init_parallel_env takes a store, or its own obeys a timeout",
    ),
    PrivateName(
        "paddle.base.core",
        "ProcessGroupGloo.create",
        "called with a store of the group's own: it writes keys without the group's name, so on a shared store "
        "one group reads the addresses of another and dies with 'connection refused' or after 30 s",
        "4 processes of mp2·pp2 start 50 times out of 50 without gloo/groups.py (group_startup.py counts)",
    ),
    PrivateName(
        "paddle.distributed.collective",
        "_new_process_group_impl",
        "replaced: the place where Paddle calls ProcessGroupGloo.create",
        "the same",
    ),
    PrivateName(
        "paddle.distributed.parallel",
        "_new_process_group_impl",
        "replaced: a copy of the same name, for the group of all ranks",
        "the same",
    ),
    PrivateName(
        "paddle.distributed.collective",
        "new_group",
        "replaced (the public paddle.distributed.new_group too): Fleet asks for the same ranks under several names; "
        "one group serves them all, with fewer sockets and a faster start",
        "Paddle shares groups, or a start is fast without it",
    ),
)

#: of collectives.py
_COLLECTIVES = (
    *_gloo_methods(
        "all_reduce allreduce reduce",
        "replaced: sums and products of float16 are inf, AVG is refused, int16 ends the process",
        "collectives_worker.py passes without",
    ),
    *_gloo_methods(
        "broadcast all_gather all_gather_into_tensor scatter scatter_tensor gather",
        "replaced: tensors that are empty or not contiguous are refused, int16 ends the process",
        "collectives_worker.py passes without",
    ),
    *_gloo_methods(
        "all_reduce_on_calc_stream reduce_on_calc_stream broadcast_on_calc_stream all_gather_on_calc_stream "
        "all_gather_into_tensor_on_calc_stream scatter_on_calc_stream scatter_tensor_on_calc_stream",
        "replaced: raises NotImplementedError; Fleet calls it on every device",
        "it is implemented",
    ),
    *_gloo_methods(
        "reduce_scatter reduce_scatter_on_calc_stream reduce_scatter_tensor reduce_scatter_tensor_on_calc_stream "
        "all_to_all all_to_all_on_calc_stream alltoall all_to_all_tensor all_to_all_tensor_on_calc_stream "
        "all_to_all_single all_to_all_single_on_calc_stream alltoall_single "
        "all_gather_partial all_gather_partial_on_calc_stream",
        "replaced: raises NotImplementedError",
        "it is implemented",
    ),
)

#: of point_to_point.py
_POINT_TO_POINT = (
    *_gloo_methods(
        "send recv",
        "replaced: a send blocks until it is received, and the two directions of a group mix up their messages",
        "a ring of 4 ranks can send before it receives (collectives_worker.py)",
    ),
    *_gloo_methods(
        "send_on_calc_stream recv_on_calc_stream send_partial send_partial_on_calc_stream recv_partial "
        "recv_partial_on_calc_stream",
        "replaced: raises NotImplementedError; Fleet's pipeline calls it on every device",
        "the same",
    ),
    *_gloo_methods(
        "_start_coalescing _end_coalescing",
        "replaced: the brackets of Fleet's batches, within which receives must wait for the sends",
        "the same",
    ),
)

#: of tensor_parallel.py and cross_entropy.py
_TENSOR_PARALLEL = (
    *_mp_ops(
        "_c_identity _mp_allreduce _c_split _c_concat",
        "replaced: their operators have no CPU kernel, two of them end the process",
        "the layers of collectives_worker.py pass without",
    ),
    *_mp_ops("_c_softmax_with_cross_entropy", "replaced: its operator has no CPU kernel", "the same"),
)

#: of fleet_parts.py
_FLEET_PARTS = (
    PrivateName(
        "paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers",
        "recompute_hybrid",
        "replaced by fleet.utils.recompute: asserts that there is a GPU",
        "it takes a CPU",
    ),
    PrivateName(
        "paddle.distributed.fleet.utils.hybrid_parallel_util",
        "broadcast_input_data",
        "replaced: asserts that there is a GPU",
        "it takes a CPU",
    ),
    PrivateName(
        "paddle.distributed.fleet.meta_parallel.tensor_parallel",
        "broadcast_input_data",
        "replaced: a copy of the same name, the one that is called",
        "the same",
    ),
    PrivateName(
        "paddle.distributed.parallel",
        "ParallelEnv.device_id",
        "its attribute _device_id is given: PipelineLayer asks for it, and a CPU has none",
        "ParallelEnv().device_id is there on CPU",
    ),
)

PRIVATE_NAMES = (*_GROUPS, *_COLLECTIVES, *_POINT_TO_POINT, *_TENSOR_PARALLEL, *_FLEET_PARTS)


def check() -> None:
    """UserError for an unsupported Paddle version, RuntimeError for a private name that is missing. Local."""
    check_paddle_version()
    for private in PRIVATE_NAMES:
        found: object = import_module(private.module)
        for part in private.name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise RuntimeError(f"Paddle {paddle.__version__} lacks {private.module}.{private.name} ({private.purpose})")
