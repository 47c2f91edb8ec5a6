"""How good a model is on held-out text."""

from tc.evaluate.perplexity import Perplexity, perplexity
from tc.evaluate.results import Result

__all__ = ["Perplexity", "Result", "perplexity"]
