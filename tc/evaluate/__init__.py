"""How good a model is on held-out text."""

from tc.evaluate.perplexity import Perplexity, perplexity

__all__ = ["Perplexity", "perplexity"]
