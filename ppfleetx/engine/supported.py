"""What this version can train; the rest resolves (`--dry-run`) and is refused here, before anything is built."""

from __future__ import annotations

import logging

from ppfleetx.config import Config, Problem, UserError

logger = logging.getLogger("ppfleetx")


def check_supported(config: Config) -> None:
    """Refuses what cannot be trained yet.

    Raises:
        UserError: with all such settings.
    """
    layout = config.Distributed
    problems = []
    if layout.sharding.sharding_degree > 1 and layout.sharding.sharding_offload:
        key, rule = "Distributed.sharding.sharding_offload", "this version keeps optimizer states on the device"
        problems.append(Problem(key, True, rule, f"-o {key}=false"))
    if problems:
        raise UserError(*problems)
    if layout.sharding.sharding_degree > 1 and layout.sharding.sharding_stage == 3 and layout.pp_degree > 1:
        logger.warning("sharding_stage 3 with pp_degree above 1 gathers every block anew for every micro-batch")
    if config.Optimizer.tensor_fusion:
        logger.warning("Optimizer.tensor_fusion has no effect in this version: parameters are updated one by one")
