"""ppfleetx: config-driven training of large language models on PaddlePaddle."""

__version__ = "0.1.0"
