"""Training a head: a corpus of the target's own answers, the target's features for it, and the training-time test."""

from .answering import CorpusSettings
from .corpus import generate_corpus
from .evaluation import ChainAcceptance, chain_acceptance
from .overlap import BenchmarkFilter
from .store import FeatureStore, split_answers
from .trainer import HeadTrainer, TrainSettings
from .vocabulary import draft_vocabulary, new_head

__all__ = [
    "BenchmarkFilter",
    "ChainAcceptance",
    "CorpusSettings",
    "FeatureStore",
    "HeadTrainer",
    "TrainSettings",
    "chain_acceptance",
    "draft_vocabulary",
    "generate_corpus",
    "new_head",
    "split_answers",
]
