"""What a user should know about a configuration before anything is built."""

from __future__ import annotations

import logging

from ppfleetx.config import Config

logger = logging.getLogger("ppfleetx")


def check_supported(config: Config) -> None:
    """Warns of what works otherwise than one may expect."""
    layout = config.Distributed
    if layout.sharding.sharding_degree > 1 and layout.sharding.sharding_stage == 3 and layout.pp_degree > 1:
        logger.warning("sharding_stage 3 with pp_degree above 1 gathers every block anew for every micro-batch")
    if config.Optimizer.tensor_fusion:
        logger.warning("Optimizer.tensor_fusion has no effect in this version: parameters are updated one by one")
