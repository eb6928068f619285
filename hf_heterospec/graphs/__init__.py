"""Compiled passes: the target's over N nodes and the head's over k rows, as graphs that live on disk.

tracing   a pass of a model -> an FX graph whose weights, cache rows, N and context length are inputs
packing   its linear layers read weights in the CPU kernels' own layout, packed once and shared by all graphs
building  graph -> compiled artefact, in a process of its own, in a folder named by everything it depends on
running   artefact + the user's weights -> what `Target` and the drafter call, and when
"""

from .running import Graphs, graphs_for

__all__ = ["Graphs", "graphs_for"]
