"""`heterospec bench`: policies, trees, chains and plain decoding side by side on prompt sets.

arms      what can be compared, by name
prompts   prompt sets as JSONL
runs      the interleaved measurement, one record per arm and prompt, resumable
report    records -> medians, speed-ups, a table, a verdict, a plot
"""

from .arms import Arm
from .report import Summary, summarise
from .runs import Record, run_arms

__all__ = ["Arm", "Record", "Summary", "run_arms", "summarise"]
