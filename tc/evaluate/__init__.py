"""How good a model is: on held-out text, on tasks, in long prompts."""

from tc.evaluate.perplexity import Perplexity, perplexity
from tc.evaluate.results import Result
from tc.evaluate.ruler import run_ruler
from tc.evaluate.tasks import run_tasks

__all__ = ["Perplexity", "Result", "perplexity", "run_ruler", "run_tasks"]
