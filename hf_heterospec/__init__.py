"""HeteroSpec for Hugging Face transformers: EAGLE-3 draft trees that follow the difficulty of the context.

Importing the package lets `generate` and pipelines take a `HeteroSpecHead` as `assistant_model`.
"""

from .configuration import HeteroSpecConfig, HeteroSpecGenerationConfig
from .decoding import HeteroSpecOutput
from .drafting import HeteroSpecCandidateGenerator
from .head import HeteroSpecHead
from .integration import install, uninstall
from .policy.repository import StratificationPolicy
from .statistics import SpeculationStatistics
from .tree import DraftTree

__version__ = "0.1.0"
__all__ = [
    "DraftTree",
    "HeteroSpecCandidateGenerator",
    "HeteroSpecConfig",
    "HeteroSpecGenerationConfig",
    "HeteroSpecHead",
    "HeteroSpecOutput",
    "SpeculationStatistics",
    "StratificationPolicy",
    "install",
    "uninstall",
]

install()
