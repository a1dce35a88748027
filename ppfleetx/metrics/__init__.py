"""Speed, memory and the log of a run. Importing it loads neither Paddle nor VisualDL."""

from ppfleetx.metrics.console import ALL_RANKS_LOGGER, Progress, setup_logging
from ppfleetx.metrics.memory import peak_memory_bytes
from ppfleetx.metrics.meter import Meter, StepRecord, peak_flops
from ppfleetx.metrics.profiler import Profiling
from ppfleetx.metrics.records import EvalRecord, TrainRecord, Window
from ppfleetx.metrics.sinks import MetricsWriter
from ppfleetx.metrics.visualdl_file import visualdl_command

__all__ = [
    "ALL_RANKS_LOGGER",
    "EvalRecord",
    "Meter",
    "MetricsWriter",
    "Profiling",
    "Progress",
    "StepRecord",
    "TrainRecord",
    "Window",
    "peak_flops",
    "peak_memory_bytes",
    "setup_logging",
    "visualdl_command",
]
